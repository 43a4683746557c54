"""Adapters to frameworks, one subpackage each; importing this package imports none of them."""

from __future__ import annotations
