"""NIXL pull: the bodies of both legs, and what a prefill's answer must hold before its handoff is used."""

from __future__ import annotations

import msgspec
import pytest

from disagg_router.connectors.nixl import NixlConnector
from disagg_router.errors import UpstreamError
from disagg_router.model import EngineAddress, Role
from tests.builders import instance, spec

CONNECTOR = NixlConnector(kv_load_failure_policy="recompute", lease_s=30)
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[4, 5, 6]],
    "remote_engine_id": "p0-first",
    "remote_num_tokens": 65,
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
}


def begun():
    return CONNECTOR.begin("r1", instance("p0"), instance("d0"))


def raw(**fields):
    """A body as the router has it: values not yet decoded."""
    return msgspec.json.decode(msgspec.json.encode(fields), type=dict[str, msgspec.Raw])


def plain(body):
    return msgspec.json.decode(msgspec.json.encode(body))


def test_c03_c26_c55_the_prefill_leg_asks_for_one_token_and_nothing_else():
    """Lengths, streaming and sampling width are the decode leg's; what makes the prompt stays."""
    client = raw(
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function"}],
        max_tokens=50,
        max_completion_tokens=24,
        min_tokens=12,
        n=4,
        best_of=5,
        stream=True,
        stream_options={"include_usage": True},
        chat_template_kwargs={"a": 1},
    )
    assert plain(CONNECTOR.prefill_body(client, begun())) == {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
    }


def test_the_decode_leg_is_the_clients_body_and_the_handoff():
    """Verbatim: not one field of the client's is changed."""
    client = raw(prompt="x", max_tokens=50, min_tokens=2, stream=True)
    handoff = CONNECTOR.complete(begun(), {"kv_transfer_params": PARAMS}, now_s=7.0)
    assert handoff.answered_s == 7.0
    assert plain(CONNECTOR.decode_body(client, handoff)) == plain(client) | {"kv_transfer_params": PARAMS}
    assert plain(CONNECTOR.local_body(client, load_external=True)) == plain(client)


def test_c11_the_release_is_a_decode_request_that_the_engine_refuses():
    """Zero tokens with the handoff's parameters frees the prefill's blocks at once."""
    handoff = CONNECTOR.complete(begun(), {"kv_transfer_params": PARAMS}, now_s=7.0)
    body = CONNECTOR.release_body("tiny", handoff)
    assert body == {"model": "tiny", "prompt": [0], "max_tokens": 0, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"remote_block_ids": [[4, 5]]}, "handed over 2 blocks where 65 tokens need 3"),
        ({"remote_block_ids": [[4, 5, 6, 7]]}, "handed over 4 blocks where 65 tokens need 3"),
        ({"remote_block_ids": []}, "without blocks"),
        ({"remote_block_ids": [[]]}, "without blocks"),
        ({"remote_block_ids": None}, "without blocks"),
        ({"remote_engine_id": "p0-second"}, "restarted"),
        ({"do_remote_prefill": False}, "without a handoff"),
    ],
)
def test_a_handoff_that_would_kill_or_mislead_the_decode_engine_is_refused(change, says):
    """Too few blocks kill it, another block size makes it answer with the wrong KV, another engine id is a restart."""
    with pytest.raises(UpstreamError, match=says):
        CONNECTOR.complete(begun(), {"kv_transfer_params": PARAMS | change}, now_s=0.0)


def test_an_answer_without_parameters_is_no_handoff():
    """An engine started without the connector answers so."""
    for answer in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": []}):
        with pytest.raises(UpstreamError, match="without a handoff"):
            CONNECTOR.complete(begun(), answer, now_s=0.0)


@pytest.mark.parametrize(
    ("role", "kv_role"),
    [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer"), (Role.UNIFIED, "kv_both")],
)
def test_what_an_engine_is_started_with(role, kv_role):
    """On CPU NIXL is patched from inside the engine; on CUDA it is not touched."""
    address = EngineAddress("10.0.0.7", 1, 5600, 3, 4)
    cpu = CONNECTOR.launch(spec(role=role, device="cpu"), address)
    cuda = CONNECTOR.launch(spec(role=role, device="cuda"), address)
    assert cpu.kv_transfer_config["kv_role"] == cuda.kv_transfer_config["kv_role"] == kv_role
    assert cpu.kv_transfer_config["kv_connector_extra_config"] == {"kv_lease_duration": 30}
    assert cpu.kv_transfer_config["kv_connector_module_path"] == "nixl_on_cpu"
    assert "kv_connector_module_path" not in cuda.kv_transfer_config
    assert cuda.python_path == ()
    assert cpu.env == {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600"}
