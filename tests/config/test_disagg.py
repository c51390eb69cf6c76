from __future__ import annotations

from typing import Any

import pytest

from headrace.config.disagg import DisaggConfig, MetadataServerConfig, is_disagg, load_disagg
from headrace.config.errors import ConfigError
from headrace.config.source import parse_document


def loaded(text: str) -> DisaggConfig:
    return load_disagg(parse_document(text, name="d.yml"), refuse_missing_features=False)


def refused(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(text)
    return str(caught.value).splitlines()


TWO = "context_servers: {num_instances: 2, urls: ['a:1', 'b:2']}\ngeneration_servers: {urls: ['c:3']}\n"


def test_a_service_with_two_groups() -> None:
    config = loaded(TWO)
    assert config.context_servers is not None
    assert config.generation_servers is not None
    assert config.context_servers.urls == ["a:1", "b:2"]
    assert (config.hostname, config.port, config.schedule_style) == ("localhost", 8000, "context_first")
    assert config.generation_servers.router.type == "round_robin"
    assert config.generation_servers.llm.max_batch_size == 2048
    assert config.is_frozen


def test_keys_at_the_top_hold_for_both_groups() -> None:
    config = loaded(
        "tensor_parallel_size: 2\nfree_gpu_memory_fraction: 0.5\n"
        "context_servers: {tensor_parallel_size: 2, max_batch_size: 4}\n"
        "generation_servers: {kv_cache_config: {tokens_per_block: 64}}\n"
    )
    assert config.context_servers is not None
    assert config.generation_servers is not None
    assert config.context_servers.llm.max_batch_size == 4
    assert config.generation_servers.llm.tensor_parallel_size == 2
    assert config.context_servers.llm.kv_cache_config.free_gpu_memory_fraction == 0.5


def test_a_group_may_not_differ_from_the_top() -> None:
    assert refused("max_batch_size: 2\ncontext_servers: {}\ngeneration_servers:\n  max_batch_size: 4\n") == [
        "d.yml:4: generation_servers.max_batch_size: is 4 here but 2 at the top level: keep one of them"
    ]


def test_short_spellings_mean_nested_keys() -> None:
    config = loaded(
        "context_servers: {kv_cache_dtype: fp8, free_gpu_memory_fraction: 0.25}\n"
        "generation_servers: {video_pruning_rate: 0.5}\n"
    )
    assert config.context_servers is not None
    assert config.generation_servers is not None
    cache = config.context_servers.llm.kv_cache_config
    assert (cache.dtype, cache.free_gpu_memory_fraction) == ("fp8", 0.25)
    assert config.generation_servers.llm.multimodal_config.video_pruning_rate == 0.5
    assert "contradicts kv_cache_config.dtype" in refused(
        "context_servers: {kv_cache_dtype: fp8, kv_cache_config: {dtype: auto}}\ngeneration_servers: {}\n"
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("context_servers: {urls: ['a']}\ngeneration_servers: {}\n",
         "d.yml:1: context_servers.urls: expected host:port, got 'a'"),
        ("context_servers: {urls: ['a:1', 'b:2']}\ngeneration_servers: {}\n",
         "d.yml:1: context_servers.urls: names 2 but num_instances is 1"),
        ("context_servers: {}\n", "d.yml: generation_servers: required unless disagg_cluster is set"),
        ("context_servers: {}\ngeneration_servers: {}\nnode_id: 256\n",
         "d.yml:3: node_id: must be less than or equal to 255, got 256"),
        ("context_servers: {}\ngeneration_servers: {}\nhostnam: x\n",
         "d.yml:3: hostnam: unknown key, did you mean 'hostname'?"),
        ("context_servers: {llm: {}}\ngeneration_servers: {}\n", "d.yml:1: context_servers.llm: unknown key: "
         "remove it, or look for the right name in 'headrace config schema'"),
        ("context_servers: {router: {type: best}}\ngeneration_servers: {}\n",
         "d.yml:1: context_servers.router.type: expected one of round_robin, load_balancing, kv_cache_aware, "
         "conversation, got 'best'"),
        ("context_servers: {}\ngeneration_servers: {}\nconditional_disagg_config: {max_local_prefill_length: 8}\n",
         "d.yml:2: generation_servers.router.type: conditional_disagg_config needs the router kv_cache_aware"),
        ("context_servers: {max_batch_size: many}\ngeneration_servers: {}\n",
         "d.yml:1: context_servers.max_batch_size: expected a whole number, got 'many'"),
    ],
)  # fmt: skip
def test_mistakes(text: str, line: str) -> None:
    assert refused(text)[0].startswith(line)


def test_a_cluster_needs_no_groups() -> None:
    config = loaded("disagg_cluster: {cluster_uri: 'etcd://h:2379', minimal_instances: {context_servers: 2}}\n")
    assert config.disagg_cluster is not None
    assert config.disagg_cluster.minimal_instances.context_servers == 2


def test_the_service_itself_is_not_built_yet() -> None:
    document = parse_document(TWO, name="d.yml")
    assert is_disagg(document)
    assert not is_disagg(parse_document("max_batch_size: 2\n", name="c.yml"))
    with pytest.raises(ConfigError, match=r"d.yml:1: context_servers: not available yet \(disaggregated serving\)"):
        load_disagg(document)


@pytest.mark.parametrize("values", [{"port": 0}, {"server_type": "zookeeper"}, {"health_check_timeout": 0}])
def test_metadata_servers(values: dict[str, Any]) -> None:
    assert MetadataServerConfig().port == 2379
    with pytest.raises(ConfigError):
        MetadataServerConfig(**values)
