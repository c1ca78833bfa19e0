"""`disagg-router simulate`: its contract, and one clear sentence for each wrong use."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SYNTHETIC = ("--profile", "h100-8b-tp1", "--synthetic", "512:64", "--rate", "10", "--requests", "200")


def simulate(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "disagg_router", "simulate", *words], capture_output=True, text=True, check=False
    )


def test_its_figures_are_those_of_the_contract():
    """One JSON object on stdout; the counts add up, and an easy load is served well."""
    done = simulate(*SYNTHETIC, "--pools", "prefill=1,decode=1", "--policy", "always_remote", "--json")
    found = json.loads(done.stdout)
    assert {"goodput_rps", "goodput_rps_per_gpu", "attainment", "offered_rps", "ttft_s", "tpot_s"} <= found.keys()
    assert {"max_gap_s", "paths", "kv_bytes_moved"} <= found.keys()
    assert found["requests"] == {"done": 200, "refused": 0, "failed": 0}
    assert found["paths"] == {"remote_prefill": 200}
    assert found["kv_bytes_moved"] == 200 * 512 * 131_072  # of 2 x 8 heads x 128 x 32 layers x 2 bytes a token
    assert found["attainment"] > 0.99
    assert found["goodput_rps_per_gpu"] == pytest.approx(found["goodput_rps"] / 2)


def test_one_seed_is_one_run():
    """Bit for bit, and another seed is another one."""
    first, again, other = (
        {
            **json.loads(simulate(*SYNTHETIC, "--seed", seed, "--json").stdout),
            "wall_s": 0,
            "simulated_requests_per_s": 0,
        }
        for seed in ("3", "3", "4")
    )
    assert first == again != other


def test_a_picture(tmp_path):
    """A PNG of some size."""
    file = tmp_path / "run.png"
    assert simulate(*SYNTHETIC, "--picture", str(file)).returncode == 0
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--profile", "b300"), "there is no profile 'b300'"),
        (("--profile", "h100-8b-tp1"), "give either --trace FILE or --synthetic IN:OUT"),
        (("--profile", "h100-8b-tp1", "--synthetic", "512:64"), "--synthetic needs --rate and --requests"),
        (("--profile", "h100-8b-tp1", "--synthetic", "512"), "512"),
        ((*SYNTHETIC, "--pools", "prefill=1"), "has nobody to decode"),
        ((*SYNTHETIC, "--pools", "decode=0"), "--pools 'decode=0'"),
        ((*SYNTHETIC, "--pools", "gpu=1"), "--pools 'gpu=1'"),
        ((*SYNTHETIC, "--profile", "prefill=h100-8b-tp1"), "says nothing of the unified pool"),
        ((*SYNTHETIC, "--policy", "best"), "best"),
        ((*SYNTHETIC, "--chunk-tokens", "few"), "neither a number of tokens nor off"),
        ((*SYNTHETIC, "--admission", "maybe"), "neither on nor off"),
        ((*SYNTHETIC, "--link-gbyte-per-s", "0"), "moves nothing"),
        (("--profile", "h100-8b-tp1", "--trace", "/nowhere", "--format", "azure"), "/nowhere"),
        (("--profile", "h100-8b-tp1", "--trace", "/nowhere", "--format", "tape"), "tape"),
    ],
)
def test_wrong_use_is_one_sentence(words, said):
    """And exit code 2."""
    done = simulate(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
