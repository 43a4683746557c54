"""``rl-attn``: the command line. Options are generated from the dataclasses that the jobs take.

Every wrong use exits with 1, argument errors too: 2 and 3 are verdicts (DRIFT, INCONCLUSIVE).
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_attn_plugin.bench.run import BenchConfig
from rl_attn_plugin.launch.config import CompareConfig, DriftConfig, JobConfig
from rl_attn_plugin.launch.errors import EXIT_ERROR, EXIT_INTERRUPTED


def parity(config: JobConfig) -> int:
    """Measure how far a trainer's log-probs are from those of the rollout that sampled the tokens.

    Two Ray workers on this machine load the same model. The rollout samples answers to the prompts with
    chunked prefill and paged decode; the trainer scores them in one packed prefill; the rollout scores them
    again along its other paths. Both do so with native attention and with the plugin's. The difference is
    printed, and written to a run directory with every token behind it.

    Exit status: 0 PASS, 2 DRIFT, 3 INCONCLUSIVE (too few tokens), 1 bad input or wrong usage, 130
    interrupted (the same command resumes).

    Examples:
      rl-attn parity
      rl-attn parity --model ./my-model --prompts prompts.jsonl --max-new-tokens 128 --out runs/mine
      rl-attn parity --inject-fault rope      # must end in DRIFT
    """
    try:
        from rl_attn_plugin.launch.job import run
    except ModuleNotFoundError as error:
        return _missing("rl-attn parity", error)
    return run(config)


def compare(captured: Path | None = None, /, config: CompareConfig = CompareConfig()) -> int:  # noqa: B008
    """Compute one attention layer the trainer's way and the rollout's ways, and say what changes which bits.

    Full prefill is the reference. Against it: chunked prefill, pages, decode token by token with a shared prefix,
    partials merged by the plugin and by TransformerEngine's own code, an fp8 cache, fused rotation; and other
    libraries' decode against their own prefill. Chunks, pages and decode must be bit-equal.

    Exit status: 0 PASS, 2 DRIFT, 3 INCONCLUSIVE (--require-te and there is none), 1 bad input or wrong usage.

    Examples:
      rl-attn compare
      rl-attn compare --batch 1 --length 8192 --heads 32 --kv-heads 8 --head-dim 128     # on a GPU
      rl-attn compare captured/        # layers of a real model, see capture_attention_inputs

    Args:
        captured: Folder with captured inputs. Default: random ones.
        config: How.
    """
    try:
        from rl_attn_plugin.launch.compare import run
    except ModuleNotFoundError as error:
        return _missing("rl-attn compare", error)
    return run(config, captured)


def drift(files: tuple[Path, ...], /, config: DriftConfig = DriftConfig()) -> int:  # noqa: B008
    """Say how far a trainer and its rollout were apart, on which tokens, and what it looks like.

    Reads log-probs from Parquet and JSONL files of any size, a token or a sequence a row: run directories of
    rl-attn parity, prime-rl's token exports, NeMo-RL's train_data_step*.jsonl, verl dumps that have both log-probs,
    or your own with the columns logp_trainer and logp_rollout. Prints a summary and writes drift.json and
    report.html: verdict, diagnosis, time series, distributions, worst tokens.

    Exit status: 0 PASS, 2 DRIFT, 3 INCONCLUSIVE (too few tokens), 1 INVALID data, bad input or wrong usage, 130
    interrupted.

    Examples:
      rl-attn drift runs/parity-1a2b3c4d
      rl-attn drift token_exports/ --groups env_name --tokenizer ./my-model
      rl-attn drift new/ --against old/ --rule "dlogp/abs_mean<=0.02"

    Args:
        files: Files (.parquet, .jsonl, .jsonl.gz) or folders of them.
        config: How.
    """
    try:
        from rl_attn_plugin.launch.drift import run
    except ModuleNotFoundError as error:
        return _missing("rl-attn drift", error)
    return run(config, files)


def doctor() -> int:
    """Tell what is installed, which implementations and integrations work here, and what mends the rest.

    Runs a small attention on each implementation and checks its bits. Starts nothing, downloads nothing.

    Exit status: 0, or 1 when something that is there does not work.
    """
    from rich.console import Console

    from rl_attn_plugin.doctor import examine, exit_status, print_findings

    findings = examine()
    print_findings(findings, Console())
    return exit_status(findings)


def bench(config: BenchConfig) -> int:
    """Time the kernels against their importable peers: forward, packed, backward, decode, merge. Needs a CUDA GPU.

    Every kernel of a case sees the same inputs in the same process, in turns; one that fails its parity check
    gets no speed. Also tells in how many rows each library's decode differs from its own prefill.

    Exit status: 0, or 1 without a GPU or when the plugin's own kernel failed a check.
    """
    from rl_attn_plugin.bench.run import run

    return run(config)


def _missing(command: str, error: ModuleNotFoundError) -> int:
    if error.name is None or error.name.startswith("rl_attn_plugin"):
        raise error
    print(f"{command} needs {error.name}: pip install 'rl-attn-plugin[ray,transformers]'", file=sys.stderr)
    return EXIT_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: arguments after the program's name; those of the process if None.

    Returns:
        The exit status.
    """
    try:
        import tyro
    except ImportError:
        print("rl-attn needs tyro: pip install 'rl-attn-plugin[ray,transformers]'", file=sys.stderr)
        return EXIT_ERROR
    app = tyro.extras.SubcommandApp()
    app.command(parity)
    app.command(compare)
    app.command(drift)
    app.command(doctor)
    app.command(bench)
    with _terminated_as_interrupted():
        try:
            status: int = app.cli(prog="rl-attn", args=argv, config=(tyro.conf.OmitArgPrefixes,))
        except SystemExit as stop:  # argparse says 2 for wrong usage
            return EXIT_ERROR if stop.code else 0
        except KeyboardInterrupt:  # before or after what a subcommand itself says
            return EXIT_INTERRUPTED
    return status


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which a scheduler sends, ends a command as Ctrl-C does: with what it has to tidy up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


if __name__ == "__main__":
    sys.exit(main())
