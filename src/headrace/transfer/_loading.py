"""From `kv_connector_config` to the two sides of a connector."""

from __future__ import annotations

import importlib
from typing import Any

from headrace.config.transfer import KvCacheConnectorConfig
from headrace.transfer.port import ConnectorSetup, NoScheduler, NoWorker, SchedulerConnector, WorkerConnector


def load_scheduler(setup: ConnectorSetup) -> SchedulerConnector:
    """Raises ValueError with the field that names no such class."""
    return _load(setup, "connector_scheduler_class", NoScheduler)


def load_worker(setup: ConnectorSetup) -> WorkerConnector:
    """Raises ValueError with the field that names no such class."""
    return _load(setup, "connector_worker_class", NoWorker)


def _load(setup: ConnectorSetup, field: str, port: type) -> Any:
    found = _class(setup.config, field)
    missing = [name for name in vars(port) if not name.startswith("_") and not callable(getattr(found, name, None))]
    if missing:
        raise ValueError(f"kv_connector_config.{field}: {found.__name__} lacks {', '.join(missing)}: add it")
    try:
        return found(setup)
    except Exception as error:
        raise ValueError(
            f"kv_connector_config.{field}: {found.__name__} can't be made ({type(error).__name__}: {error})"
        ) from error


def _class(config: KvCacheConnectorConfig, field: str) -> type:
    module_name, name = config.connector_module, config.__dict__[field]
    assert module_name and name, "the configuration has been checked"
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(
            f"kv_connector_config.connector_module: {module_name} can't be imported ({type(error).__name__}: {error})"
        ) from error
    found = vars(module).get(name)
    if not isinstance(found, type):
        raise ValueError(f"kv_connector_config.{field}: {module_name} has no class {name}: give one of its classes")
    return found
