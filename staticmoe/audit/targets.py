"""What `staticmoe audit` is pointed at: a factory of the runner's arguments, or a script that builds a runner."""

from __future__ import annotations

import contextlib
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from staticmoe import StaticMoERunner
from staticmoe.audit.arguments import Arguments
from staticmoe.audit.findings import Report
from staticmoe.audit.run import audit
from staticmoe.errors import ConfigError


def audit_factory(target: str) -> Report:
    """Audit what `pkg.module:factory` returns; the working directory is importable meanwhile.

    Raises:
        ConfigError: there is no such factory, or it does not return the runner's arguments.
    """
    with _importable(Path.cwd()):
        return audit(Arguments.of(_factory(target)()))


def audit_script(script: Path, arguments: Sequence[str]) -> Report:
    """Run a script as its user would, audit at the first construction of a runner, and stop it there.

    Raises:
        ConfigError: no such script, or it ended without building a runner.
    """
    if not script.is_file():
        raise ConfigError(f"target: expected a script or pkg.module:factory, got {str(script)!r}, which is no file")
    with (
        _importable(script.resolve().parent),
        _replaced(sys, "argv", [str(script), *arguments]),
        _replaced(StaticMoERunner, "__init__", _audit_instead),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Audited as done:
            return done.report
        except SystemExit as error:
            raise ConfigError(
                f"{script}: expected it to build a StaticMoERunner, but it exited with {error.code!r} before; give it "
                "its arguments behind --"
            ) from error
    raise ConfigError(f"{script}: expected it to build a StaticMoERunner, but it ended without one")


class _Audited(BaseException):
    """Stops a script behind the audit; no exception of the kind that scripts catch."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self.report = report


def _audit_instead(self: StaticMoERunner, model: Any, optimizer: Any, **options: Any) -> None:
    """In place of the runner's constructor."""
    # What a runner that never was is asked when Python takes it down.
    self._closed = "it was audited, not built"
    given = Arguments.of({"model": model, "optimizer": optimizer, **options})
    raise _Audited(audit(given, caller=sys._getframe(1)))


def _factory(target: str) -> Callable[[], Any]:
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise ConfigError(f"target: expected pkg.module:factory or a script that ends in .py, got {target!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that the user's own module misses is theirs to see.
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise ConfigError(
            f"target: expected a module that can be imported from {Path.cwd()}, got {module_name!r}"
        ) from (error)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"target: expected a function {name!r} in {module_name}, got {type(factory).__name__}")
    return factory


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` as `value`, and afterwards as it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """`folder` first on the module path, as for a script that lies there."""
    before = list(sys.path)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
