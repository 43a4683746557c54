"""A private, quiet Ray on this machine, and the two actors on it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl_attn_plugin.launch.config import ARM_UNDER_TEST, PATHS, Sampling
from rl_attn_plugin.launch.errors import JobError
from rl_attn_plugin.launch.policies.base import PolicyIdentity, PolicySpec
from rl_attn_plugin.launch.rollout import Request
from rl_attn_plugin.launch.workers import RolloutWorker, Sampled, Scored, TrainerWorker

_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum is 75 MiB; what is passed around is some kilobytes

_SESSION = "rl-attn-ray-"

# Ray reads these when it starts: no telemetry, no metrics exporter.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextlib.contextmanager
def local_ray(*, gpu: bool, logs: Path) -> Iterator[None]:
    """Ray on this machine alone, or the one this process already has.

    It never joins a cluster (``RAY_ADDRESS`` is not read) and listens on the loopback address. Its session
    lives in a short temporary path, because the sockets in it may not have long names; the workers' output
    is kept in ``logs``.

    Args:
        gpu: offer one GPU.
        logs: folder that receives the workers' output at the end.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    _sweep_dead_sessions()
    session = Path(tempfile.mkdtemp(prefix=f"{_SESSION}{os.getpid()}-"))
    try:
        ray.init(
            address="local",
            num_cpus=2,  # one each, also where the machine has only one core
            num_gpus=1 if gpu else 0,
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(session),
            _node_ip_address="127.0.0.1",
        )
        if threading.current_thread() is threading.main_thread():
            # Ray's handler exits on the spot; what a scheduler sends should end a job as Ctrl-C does.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield
    finally:
        ray.shutdown()
        _keep_logs(session, logs)
        shutil.rmtree(session, ignore_errors=True)


class Pair:
    """A trainer and a rollout that are replaced when they die.

    Args:
        trainer: what the trainer loads.
        rollout: what the rollout loads.
        arms: that every shard is measured in.
        gpu: each takes half of the GPU, else one core.
        tries: how often one piece of work is started before giving up.
        say: prints a line for the user.
    """

    def __init__(
        self, trainer: PolicySpec, rollout: PolicySpec, *, arms: Sequence[str], gpu: bool, tries: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._trainer = _Side("trainer", TrainerWorker, trainer, gpu=gpu)
        self._rollout = _Side("rollout", RolloutWorker, rollout, gpu=gpu)
        self._arms = arms
        self._tries = tries
        self._say = say
        for side in (self._trainer, self._rollout):  # both load at once
            side.start()
        for side in (self._trainer, self._rollout):
            self._await_loaded(side)

    def identities(self) -> tuple[PolicyIdentity, PolicyIdentity]:
        """What the trainer and what the rollout loaded."""
        trainer, rollout = self._trainer.identity, self._rollout.identity
        assert trainer is not None and rollout is not None  # set by __init__
        return trainer, rollout

    def measure(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        chunk_size: int,
        *,
        advance: Callable[[str], None],
        restart: Callable[[], None],
    ) -> tuple[Sampled, dict[tuple[str, str], Scored]]:
        """Everything about one shard, from the start again if a side dies in it.

        Args:
            requests: the shard.
            sampling: how to draw.
            chunk_size: of chunked prefills.
            advance: called with the name of each phase when it is done.
            restart: called before the shard is done again.

        Returns:
            The drawn tokens and, for each arm and each of ``full_prefill`` and the rollout's paths, the
            log-probs.

        Raises:
            JobError: a side died in every try.
        """
        for attempt in range(1, self._tries + 1):
            try:
                return self._measure_once(requests, sampling, chunk_size, advance)
            except _Died as death:
                if attempt == self._tries:
                    raise JobError(
                        f"the {death.side.name} died in all {self._tries} tries of one shard ({death}); "
                        "finished shards are kept, logs are in the run directory's logs/. The usual cause is "
                        "too little memory: a smaller --shard-size needs less"
                    ) from death
                self._say(
                    f"the {death.side.name} died ({death}): started again, the shard is done again "
                    f"(try {attempt + 1} of {self._tries})"
                )
                restart()
                death.side.start()
                self._await_loaded(death.side)
        raise AssertionError("unreachable")

    def compare_layers(
        self, sequences: Sequence[Sequence[int]], layers: Sequence[int], chunk_size: int, page_size: int
    ) -> list[dict[str, Any]]:
        """`TrainerWorker.compare_layers`, from the start again if the trainer dies in it.

        Raises:
            JobError: the layers cannot be compared, or the trainer died in every try.
        """
        import ray

        side = self._trainer
        for attempt in range(1, self._tries + 1):
            try:
                found: list[dict[str, Any]] = side.get(
                    side.actor.compare_layers.remote(sequences, layers, chunk_size, page_size)
                )
                return found
            except _Died as death:
                if attempt == self._tries:
                    raise JobError(
                        f"the {side.name} died in all {self._tries} tries to compare layers ({death})"
                    ) from death
                self._say(f"the {side.name} died ({death}): started again")
                side.start()
                self._await_loaded(side)
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, (ValueError, NotImplementedError)):
                    raise JobError(f"--te-oracle: {error.cause}") from error
                raise
        raise AssertionError("unreachable")

    def peak_mib(self) -> dict[str, int]:
        """Peak memory of each side so far; a side that has just died is left out."""
        peaks = {}
        for side in (self._trainer, self._rollout):
            with contextlib.suppress(_Died):
                peaks[side.name] = int(side.get(side.actor.peak_mib.remote()))
        return peaks

    def audits(self) -> dict[str, dict[str, Any]]:
        """What ran inside the batch-invariant mode on each side since it was started; a dead side is left out."""
        found = {}
        for side in (self._trainer, self._rollout):
            with contextlib.suppress(_Died):
                found[side.name] = side.get(side.actor.audit.remote())
        return found

    def _measure_once(
        self, requests: Sequence[Request], sampling: Sampling, chunk_size: int, advance: Callable[[str], None]
    ) -> tuple[Sampled, dict[tuple[str, str], Scored]]:
        import ray

        trainer, rollout = self._trainer, self._rollout
        sampled: Sampled = rollout.get(
            rollout.actor.sample.remote(ARM_UNDER_TEST, requests, sampling, chunk_size)
        )
        advance(f"{ARM_UNDER_TEST} sampled")
        scored = {(ARM_UNDER_TEST, "recorded"): sampled.recorded}
        pending: dict[Any, tuple[_Side, str, str]] = {}
        for arm in self._arms:
            ref = trainer.actor.score.remote(arm, requests, sampled, sampling.temperature)
            pending[ref] = (trainer, arm, "full_prefill")
            for path in PATHS:
                if (arm, path) not in scored:
                    ref = rollout.actor.replay.remote(arm, path, requests, sampled, sampling, chunk_size)
                    pending[ref] = (rollout, arm, path)
        try:
            while pending:
                (ref,), _ = ray.wait(list(pending), num_returns=1)
                side, arm, phase = pending.pop(ref)
                scored[arm, phase] = side.get(ref)
                advance(f"{arm} {phase}")
        finally:
            for ref in pending:  # after a death: what the other side has not begun is of no use any more
                ray.cancel(ref)
        return sampled, scored

    def _await_loaded(self, side: _Side) -> None:
        """Waits until a started side has loaded its model.

        Raises:
            JobError: it cannot load it, keeps dying, or loaded something else than before it died.
        """
        import ray

        for attempt in range(1, self._tries + 1):
            try:
                identity: PolicyIdentity = side.get(side.loading)
                break
            except _Died as death:
                if attempt == self._tries:
                    raise JobError(
                        f"the {side.name} died in all {self._tries} tries to load ({death})"
                    ) from death
                self._say(f"the {side.name} died while it loaded ({death}): started again")
                side.start()
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, (OSError, ValueError, ImportError)):  # about the model
                    raise JobError(f"the {side.name} cannot load {side.spec.model}: {error.cause}") from error
                raise
        if side.identity is not None and identity != side.identity:
            raise JobError(
                f"the {side.name} was started again and loaded other weights: they changed during the run"
            )
        side.identity = identity


class _Died(Exception):
    """A side's process is gone."""

    def __init__(self, side: _Side, reason: str) -> None:
        super().__init__(reason)
        self.side = side


class _Side:
    """One actor and what is needed to start it again."""

    def __init__(self, name: str, cls: type, spec: PolicySpec, *, gpu: bool) -> None:
        self.name = name
        self.spec = spec
        self.identity: PolicyIdentity | None = None
        self.actor: Any = None
        self.loading: Any = None
        self._cls = cls
        self._cpus, self._gpus = (0.0, 0.5) if gpu else (1.0, 0.0)

    def start(self) -> None:
        """A new process that begins to load."""
        import ray

        if self.actor is not None:
            ray.kill(self.actor)
        self.actor = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus)(self._cls).remote()
        self.loading = self.actor.load.remote(self.spec)

    def get(self, ref: Any) -> Any:
        """The value of one of this side's calls.

        Raises:
            _Died: the process is gone.
        """
        import ray

        try:
            return ray.get(ref)
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise _Died(self, str(error).strip().splitlines()[0]) from error


def _sweep_dead_sessions() -> None:
    """Removes the temporary folders of jobs that were killed and could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SESSION}*-*"):
        pid = folder.name.removeprefix(_SESSION).split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _keep_logs(session: Path, logs: Path) -> None:
    # Logs are a courtesy: a full disk must not hide the result or the error that comes after.
    with contextlib.suppress(OSError):
        for path in (session / "session_latest" / "logs").glob("worker-*"):
            if path.stat().st_size:
                shutil.copy(path, logs / path.name)
