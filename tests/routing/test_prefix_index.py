"""Token hashes and the prefix index: what is believed of each target, tier by tier, and what it costs."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import tracemalloc
from array import array
from collections import Counter

import pytest

from disagg_router.model import InstanceId, Target
from disagg_router.routing.prefix_index import Dropped, PrefixIndex
from disagg_router.routing.token_hashes import chain, extend, root

BLOCK = 4
P0, D0 = Target(InstanceId("p0")), Target(InstanceId("d0"))
PROMPT = list(range(100, 116))  # 4 blocks
FULL = {"group": 0, "kind": "full_attention"}


def index(max_entries=10_000):
    return PrefixIndex(max_entries)


def store(to, target=P0, tokens=PROMPT, names=(1, 2, 3, 4), parent=None, **fields):
    to.stored(target, list(names), parent, tokens[: len(names) * BLOCK], fields.pop("block", BLOCK), **(FULL | fields))


def held(of, target=P0, tokens=PROMPT, **key):
    found = of.cached_tokens(chain(tokens, BLOCK, **key), BLOCK).get(target)
    return tuple(found) if found else None


def drops(of):
    return {reason.value: count for reason, count in of.stats().dropped.items() if count}


# --- hashes -------------------------------------------------------------------------------------------------


def test_a_key_names_its_block_and_all_before_it():
    """Equal prefixes have equal keys; from the first difference on all keys differ, block size included."""
    keys = chain(PROMPT, BLOCK)
    assert keys[:2] == chain(PROMPT[:8], BLOCK)
    assert keys == keys[:2] + extend(keys[1], PROMPT[8:], BLOCK)
    assert extend(root(salt=None, lora=None), PROMPT, BLOCK) == keys
    for place in range(16):
        other = chain([t + (n == place) for n, t in enumerate(PROMPT)], BLOCK)
        same = place // BLOCK
        assert other[:same] == keys[:same]
        assert not set(other[same:]) & set(keys)
    assert not set(chain(PROMPT, 8)) & set(keys)
    assert all(0 <= key < 1 << 64 for key in keys)


@pytest.mark.parametrize("tokens", range(10))
def test_only_full_blocks_have_keys(tokens):
    """As in the engine, which announces no others."""
    assert len(chain(PROMPT[:tokens], BLOCK)) == tokens // BLOCK


def test_salt_and_adapter_change_every_key():
    """And cannot stand for each other; an empty salt is none."""
    kinds = [{}, {"salt": "a"}, {"lora": "a"}, {"salt": "a", "lora": "a"}, {"salt": "', 'a"}, {"lora": "None"}]
    chains = [chain(PROMPT, BLOCK, **kind) for kind in kinds]
    assert len({key for keys in chains for key in keys}) == len(kinds) * 4
    assert chain(PROMPT, BLOCK, salt="") == chains[0]


def test_every_process_makes_the_same_keys():
    """Brain and workers are processes of their own: no hash seed of Python's may enter."""
    program = (
        "from disagg_router.routing.token_hashes import chain; print(chain(range(100, 116), 4, salt='s', lora='l'))"
    )
    for seed in ("0", "42"):
        answer = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert answer.stdout.strip() == str(chain(PROMPT, BLOCK, salt="s", lora="l"))


def test_keys_do_not_collide():
    """Over 80,000 blocks that differ as little as blocks can: in one token, by one."""
    keys = {key for first in range(20_000) for key in chain([first, *PROMPT[1:]], BLOCK)}
    assert len(keys) == 80_000


# --- events -------------------------------------------------------------------------------------------------


def test_engine_hashes_need_not_agree():
    """Two engines with other hashes, of another type even, for the same tokens: one prompt finds both (C17)."""
    of = index()
    store(of, P0, names=(1, 2, 3))
    store(of, D0, names=(b"x", b"y"))
    store(of, D0, tokens=PROMPT[8:], names=(b"z",), parent=b"y")
    assert held(of, P0) == held(of, D0) == (12, 0)
    assert of.stats().blocks == 3
    of.removed(D0, [b"z"], group=0)
    assert (held(of, P0), held(of, D0)) == ((12, 0), (8, 0))


def test_tiers_are_kept_apart():
    """Stored on GPU, stored on CPU without tokens, removed from GPU: still there, in the lower tier (C60)."""
    of = index()
    store(of)
    of.stored(P0, [1, 2, 3, 4], None, [], 0, medium="CPU", group=0)
    assert held(of) == (16, 0)
    of.removed(P0, [4, 3], medium="GPU", group=0)
    assert held(of) == (8, 8)
    of.removed(P0, [2, 1], medium="GPU", group=0)
    assert held(of) == (0, 16)
    of.removed(P0, [3], medium="CPU", group=0)
    assert held(of) == (0, 8)
    of.removed(P0, [1, 2, 4], medium="CPU", group=0)
    assert held(of) is None
    assert of.stats().entries == of.stats().blocks == 0
    assert drops(of) == {}


def test_sparse_groups_make_no_prefixes():
    """A sliding-window group uses the same hashes, with a block size of its own; it neither adds nor removes (C60)."""
    of = index()
    store(of, names=(1, 2))
    of.stored(P0, [1], None, PROMPT[:8], 8, group=1, kind="sliding_window")
    of.stored(P0, [7], None, PROMPT[:4], 4, group=1, kind="sliding_window")
    of.removed(P0, [1, 2], group=1)
    of.stored(P0, [1], None, PROMPT[:4], 4, group=2, kind="full_attention")  # group 0 speaks for it
    of.removed(P0, [1], group=2)
    assert held(of) == (8, 0)
    assert drops(of) == {"sparse_group": 3}


def test_a_block_is_gone_with_its_last_copy():
    """Equal prompts computed at once are kept, and announced, twice."""
    of = index()
    store(of)
    store(of, names=(1, 2))
    of.removed(P0, [2, 1], group=0)
    assert held(of) == (16, 0)
    of.removed(P0, [4, 3, 2, 1], group=0)
    assert held(of) is None


@pytest.mark.parametrize(
    ("fields", "reason", "left"),
    [
        ({"parent": 99}, "unknown_parent", None),
        ({"tokens": [], "medium": "CPU"}, "unknown_hash", None),
        ({"medium": "STORAGE"}, "medium", None),
        ({"tokens": PROMPT[:9]}, "malformed", None),
        ({"block": 0}, "malformed", None),
        ({"extra_keys": [None]}, "malformed", None),
        ({"medium": "CPU"}, "block_size", None),  # no GPU block has said yet what size counts
        ({"extra_keys": [None, [["image", -2]], None, None]}, "not_text", (4, 0)),
        ({"extra_keys": [None, None, [b"embedding"], None]}, "not_text", (8, 0)),
        ({"names": (1, 1, 3, 4)}, "renamed", (4, 0)),
    ],
)
def test_what_cannot_be_used_is_dropped_and_counted(fields, reason, left):
    """Nothing beyond the text that comes before it is believed."""
    of = index()
    store(of, **fields)
    assert held(of) == left
    blocks = 4 - (left[0] // BLOCK if left else 0)
    assert drops(of) == {reason: blocks}
    if left:
        store(of, tokens=PROMPT[12:], names=(5,), parent=4)
        assert held(of) == left


def test_another_block_size_of_the_same_target_is_dropped():
    """A store behind the engine may announce chunks of its own."""
    of = index()
    store(of, names=(1, 2))
    of.stored(P0, [9], None, PROMPT[:8], 8, medium="CPU")
    assert drops(of) == {"block_size": 1}
    assert of.cached_tokens(chain(PROMPT, 8), 8) == {}


def test_salted_and_adapted_prompts_are_found_under_their_own_key_only():
    """The salt stands with block 0, the adapter's name with every block."""
    of = index()
    store(of, names=(1, 2, 3, 4), extra_keys=[["pepper"], None, None, None])
    store(of, names=(5, 6), lora="l", extra_keys=[["l", "pepper"], ["l"]])
    store(of, tokens=PROMPT[8:], names=(7,), parent=6, lora="l", extra_keys=[["l"]])
    assert held(of) is None
    assert held(of, lora="l") is None
    assert held(of, salt="pepper") == (16, 0)
    assert held(of, salt="pepper", lora="l") == (12, 0)


def test_a_gap_is_seen():
    """An engine that loses a block before those that follow it is not trusted beyond, until it has it again."""
    of = index()
    store(of)
    store(of, D0)
    of.removed(P0, [2], group=0)
    assert (held(of, P0), held(of, D0)) == ((4, 0), (16, 0))
    assert of.stats().gappy_targets == 1
    store(of, names=(1, 2))
    assert held(of, P0) == (16, 0)
    assert of.stats().gappy_targets == 0


@pytest.mark.parametrize("way", ["forget", "cleared"])
def test_a_target_that_is_gone_leaves_nothing(way):
    """And its place is taken by the next without inheriting anything."""
    of = index()
    store(of, P0)
    store(of, D0, names=(5, 6))
    getattr(of, way)(P0)
    assert (held(of, P0), held(of, D0)) == (None, (8, 0))
    assert (of.stats().entries, of.stats().blocks) == (2, 2)
    store(of, Target(InstanceId("p1")), names=(8,))
    store(of, P0, names=(9,))
    assert held(of, P0) == held(of, Target(InstanceId("p1"))) == (4, 0)


def test_ranks_of_one_instance_are_targets_of_their_own():
    """Rank 1's blocks are not rank 0's (C52)."""
    of = index()
    store(of, Target(InstanceId("p0"), 1))
    assert held(of, Target(InstanceId("p0"), 0)) is None


@pytest.mark.parametrize("max_entries", [10_000, 60])
def test_what_is_believed_is_what_was_told(max_entries):
    """10,000 random events on a small world, in any order an engine might send: equal to a plain model of it.

    And never more than that where room is short.
    """
    rng = random.Random(5)
    targets = [P0, D0, Target(InstanceId("d1"))]
    words = [[n * 4, n * 4 + 1, n * 4 + 2, n * 4 + 3] for n in range(3)]
    of, truth = index(max_entries), Counter()

    def known(target, path):
        return any(truth[target, tier, path] for tier in ("GPU", "CPU"))

    for turn in range(10_000):
        target, medium = rng.choice(targets), rng.choice(["GPU", "GPU", "CPU"])
        path = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 5)))
        last = words[path[-1]]
        action = rng.random()
        if action < 0.001:
            of.forget(target)
            truth = Counter({key: n for key, n in truth.items() if key[0] != target})
        elif action < 0.5:
            if (len(path) == 1 or known(target, path[:-1])) and (medium == "GPU" or known(target, path)):
                of.stored(target, [repr(path).encode()], repr(path[:-1]).encode() if len(path) > 1 else None,
                          last, 4, medium=medium, **FULL)  # fmt: skip
                truth[target, medium, path] += 1 if medium == "GPU" else 1 - truth[target, medium, path]
        elif truth[target, medium, path]:
            of.removed(target, [repr(path).encode()], medium=medium, group=0)
            truth[target, medium, path] -= 1
        if turn % 5 == 0:
            found = of.cached_tokens(chain([t for word in path for t in words[word]], 4), 4)
            for each in targets:
                gpu = host = whole = 0
                while gpu < len(path) and truth[each, "GPU", path[: gpu + 1]]:
                    gpu += 1
                while gpu + host < len(path) and truth[each, "CPU", path[: gpu + host + 1]]:
                    host += 1
                while whole < len(path) and known(each, path[: whole + 1]):
                    whole += 1
                gpu_tokens, host_tokens = found.get(each, (0, 0))
                if max_entries == 60:
                    assert gpu_tokens <= gpu * 4
                    assert gpu_tokens + host_tokens <= whole * 4
                else:
                    assert (gpu_tokens, host_tokens) == (gpu * 4, host * 4)
    holdings = len({(t, p) for (t, _, p), n in truth.items() if n})
    assert of.stats().entries == holdings if max_entries > 60 else of.stats().entries <= 60
    assert (of.stats().evictions > 100) == (max_entries == 60)


# --- bounds -------------------------------------------------------------------------------------------------


def test_the_least_recently_used_chain_goes_first():
    """From its end, so that what is left are whole prefixes; being looked up is a use."""
    of = index(max_entries=8)
    prompts = [[n, *PROMPT[1:]] for n in range(4)]
    for n in (0, 1):
        store(of, tokens=prompts[n], names=range(n * 10, n * 10 + 4))
    assert held(of, tokens=prompts[0]) == (16, 0)
    store(of, tokens=prompts[2], names=(20, 21))
    assert held(of, tokens=prompts[0]) == (16, 0)
    store(of, tokens=prompts[3], names=(30, 31, 32, 33))
    assert [held(of, tokens=prompt) for prompt in prompts] == [(16, 0), None, None, (16, 0)]
    assert (of.stats().entries, of.stats().evictions) == (8, 6)
    store(of, tokens=PROMPT[12:], names=(22,), parent=21)
    assert drops(of) == {"unknown_parent": 1}


def test_a_shared_prefix_outlives_what_follows_it():
    """Also when only its middle is ever looked up."""
    of = index(max_entries=6)
    store(of)
    for n in range(50):
        assert held(of, tokens=PROMPT[:8]) == (8, 0)
        store(of, tokens=[500 + n] * 12, names=range(100 + 3 * n, 103 + 3 * n))
    assert held(of, tokens=PROMPT[:8]) == (8, 0)


def test_blocks_that_nobody_holds_count_too():
    """They are kept for what follows them; the bound holds for them as well."""
    of = index(max_entries=100)
    for n in range(200):
        store(of, tokens=[n, *PROMPT[1:]], names=range(n * 4, n * 4 + 4))
        of.removed(P0, range(n * 4, n * 4 + 3), group=0)
        assert max(of.stats().entries, of.stats().blocks) <= 100


@pytest.mark.long
def test_memory_stays_within_the_bound():
    """100,000 different prompts of 2,048 tokens (C49); traced while the first 16,000 fill it three times over."""
    entries, block, tail = 20_000, 512, list(range(2047))
    of, targets = index(entries), [Target(InstanceId(f"p{n}")) for n in range(64)]

    def tell(prompts):
        for n in prompts:
            names = [n * 4 + 10**18 + place for place in range(4)]
            of.stored(targets[n % 64], names, None, [n, *tail], block, **FULL)
        return tracemalloc.get_traced_memory()[0] / entries

    tracemalloc.start()
    try:
        half_way, grown = tell(range(10_000)), tell(range(10_000, 16_000))
    finally:
        tracemalloc.stop()
    tell(range(16_000, 100_000))
    print(f"\n{grown:.0f} bytes per entry, {half_way:.0f} half-way")
    assert grown < 450 * 1.2
    assert grown < half_way * 1.05
    assert (of.stats().entries, of.stats().evictions) == (entries, 400_000 - entries)
    for target in targets:
        of.forget(target)
    assert (of.stats().entries, of.stats().blocks) == (0, 0)


def test_what_a_lookup_costs():
    """Printed, for 64 targets and a 32,768-token prompt; other depths than asked for would be an error."""
    of, rng = index(200_000), random.Random(3)
    prompt = [rng.randrange(150_000) for _ in range(32_768)]
    names = [rng.getrandbits(64) for _ in range(2048)]
    depths = {Target(InstanceId(f"p{n}")): 32 * (n + 1) for n in range(64)}
    for target, depth in depths.items():
        of.stored(target, names[:depth], None, prompt[: depth * 16], 16, **FULL)
    hashing_s, lookup_s, found = [], [], {}
    for _ in range(21):
        began_s = time.perf_counter()
        keys = chain(prompt, 16)
        hashed_s = time.perf_counter()
        found = of.cached_tokens(keys, 16)
        hashing_s.append(hashed_s - began_s)
        lookup_s.append(time.perf_counter() - hashed_s)
    assert {target: each.gpu_tokens for target, each in found.items()} == {t: d * 16 for t, d in depths.items()}
    print(f"\n2,048 keys {sorted(hashing_s)[10] * 1e6:.0f} us, lookup {sorted(lookup_s)[10] * 1e6:.0f} us (medians)")
    assert set(of.stats().dropped) == set(Dropped)


def test_keys_by_hand():
    """key = parent x STEP + sum of FACTOR x token, modulo 2**64; a list, a tuple and an array give the same."""
    (first,) = extend(0, [1, 0], 2)
    (second,) = extend(0, [0, 1], 2)
    (step,) = extend(1, [0, 0], 2)
    keys = extend(7, [5, 6, 8, 9], 2)
    one = (7 * step + 5 * first + 6 * second) % 2**64
    assert keys == [one, (one * step + 8 * first + 9 * second) % 2**64]
    assert extend(7, array("I", [5, 6, 8, 9]), 2) == extend(7, (5, 6, 8, 9), 2) == keys


def test_a_prompt_longer_than_is_hashed_at_once_has_the_same_keys():
    """In two goes or in one."""
    tokens = array("I", range(70_000))
    head = extend(3, tokens[:40_000], 1)
    assert extend(3, tokens, 1) == head + extend(head[-1], tokens[40_000:], 1)


@pytest.mark.parametrize("token", [-1, 2**63, 10**30])
def test_what_is_no_token_id_has_keys_all_the_same(token):
    """A client may send anything as token ids; the engine refuses it."""
    assert len(chain([token] * 8, 4)) == 2
