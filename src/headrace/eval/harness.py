"""lm-eval's tasks over a model of this process (the extra `eval`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.eval.port import Model

__all__ = ["require_lm_eval", "run_tasks"]


def require_lm_eval() -> None:
    """Raises ValueError: it isn't installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed: pip install 'headrace[eval]'")


def run_tasks(
    model: Model,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: float | None = None,
    include_path: Path | None = None,
    apply_chat_template: bool = False,
    seed: int = 0,
    max_length: int | None = None,
) -> dict[str, Any]:
    """lm-eval's result of these tasks, with `results` and `samples` by task.

    Args:
        include_path: folder of task files of the caller's own.
        max_length: most tokens of a window; None is what the model takes.

    Raises:
        ValueError: lm-eval isn't installed, or it doesn't know a task.
    """
    require_lm_eval()
    from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from headrace.eval.harness_model import HeadraceLM

    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ValueError(f"--tasks: lm-eval has no task {', '.join(unknown)}: see 'lm-eval ls tasks' for their names")
    found = simple_evaluate(
        model=HeadraceLM(model, max_length=max_length),
        tasks=list(tasks),
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        apply_chat_template=apply_chat_template,
        bootstrap_iters=0,
        random_seed=seed,
        numpy_random_seed=seed,
        torch_random_seed=seed,
        fewshot_random_seed=seed,
    )
    assert found is not None
    return dict(found)
