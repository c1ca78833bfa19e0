"""Profiles: what is shipped, what a file may say, and the one sentence that a bad one gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg_router.errors import ConfigError
from disagg_router.model import Role
from disagg_router.sim.profile_file import Tables, read_tables
from disagg_router.sim.profiles import FOLDER, NAMES, load_profile, load_profiles

GB_BYTES = 1e9
LINEAR = """
linear: {prefill_a_s: 0.01, prefill_b_s: 1.0e-4, prefill_c_s: 2.0e-9,
  step_d_s: 0.02, step_e_s: 1.0e-4, step_f_s: 1.0e-8}
"""
SIZES = "kv_capacity_tokens: 1000\nkv_bytes_per_token: 2048\n"
PREFILL = """prompts,new_tokens,cached_tokens,step_ms
1,100,0,20
1,200,0,31
2,100,0,30
1,200,1000,41
"""
DECODE = """streams,context_tokens,step_ms
1,100,11
1,1000,12
8,100,13
8,1000,21
"""


def test_the_shipped_names_are_those_of_the_files() -> None:
    """Each of the eight loads, and every file there has a name."""
    assert {file.stem for file in FOLDER.glob("*.yaml")} == set(NAMES)
    assert [load_profile(name).name for name in NAMES] == list(NAMES)


@pytest.mark.parametrize(
    ("name", "gpus", "memory_gb", "weights_gb", "bytes_per_token"),
    [
        # Layers x 2 x KV heads x 128 x 2 bytes; weights of 8.03e9 and 70.55e9 parameters.
        ("a100-8b-tp1", 1, 80, 16.06, 32 * 2 * 8 * 128 * 2),
        ("h100-8b-tp1", 1, 80, 16.06, 32 * 2 * 8 * 128 * 2),
        ("h200-8b-tp1", 1, 141, 16.06, 32 * 2 * 8 * 128 * 2),
        ("a100-70b-tp4", 4, 80, 141.1, 80 * 2 * 8 * 128 * 2),
        ("h100-70b-tp4", 4, 80, 141.1, 80 * 2 * 8 * 128 * 2),
        ("h200-70b-tp4", 4, 141, 141.1, 80 * 2 * 8 * 128 * 2),
    ],
)
def test_kv_fills_what_weights_leave(
    name: str, gpus: int, memory_gb: float, weights_gb: float, bytes_per_token: int
) -> None:
    """Nine tenths of the memory, less weights and 2 GB per GPU."""
    profile = load_profile(name)
    free_bytes = (memory_gb * 0.9 * gpus - weights_gb - 2 * gpus) * GB_BYTES
    assert (profile.gpus, profile.kv_bytes_per_token) == (gpus, bytes_per_token)
    assert profile.kv_capacity_tokens == int(free_bytes / bytes_per_token)


@pytest.mark.parametrize("name", ["a100-13b-tp1-distserve", "a100-13b-tp1-vllm2023"])
def test_opt_13b_is_as_distserve_published_it(name: str) -> None:
    """40 layers of width 5,120 in 16 bits, and the capacity of its authors' table."""
    profile = load_profile(name)
    assert (profile.gpus, profile.kv_capacity_tokens) == (1, 66_144)
    assert profile.kv_bytes_per_token == 40 * 2 * 5120 * 2


@pytest.mark.parametrize(
    ("name", "chunks", "running", "context_tokens", "step_ms"),
    [
        ("a100-13b-tp1-distserve", ((512, 0),), 0, 0, 18.1025 + 0.101912 * 512 + 7.12226e-6 * 512**2),
        ("a100-13b-tp1-distserve", (), 64, 36_864, 19.9347 + 6.26936e-4 * 36_864 + 0.0385070 * 64),
        ("a100-13b-tp1-distserve", (), 100, 57_600, 7.16619 + 5.79800e-4 * 57_600 + 0.158311 * 100),
        ("a100-13b-tp1-vllm2023", ((512, 0),), 0, 0, 22.0522 + 0.140509 * 512 + 8.07658e-6 * 512**2),
        ("a100-13b-tp1-vllm2023", (), 64, 36_864, 23.4750 + 5.92934e-4 * 36_864 + 0.0607269 * 64),
        ("a100-13b-tp1-vllm2023", (), 100, 57_600, 20.2064 + 4.90773e-4 * 57_600 + 0.120003 * 100),
    ],
)
def test_opt_13b_takes_what_distserve_published(
    name: str, chunks: tuple[tuple[int, int], ...], running: int, context_tokens: float, step_ms: float
) -> None:
    """Its coefficients (fit of 2024, in milliseconds), with no host time of ours."""
    profile = load_profile(name)
    assert profile.timings.step_s(chunks, running, context_tokens) * 1000 == pytest.approx(step_ms, rel=1e-5)


# aic_vllm_fits.csv: a, b, c, d, e, f in ms, and the mean and largest relative errors of the fit in per cent.
FITS = [
    ("a100-70b-tp4", (22.091089, 0.150558, 3.758e-06, 27.6374362, 0.104356, 5.6e-05), (2.2, 9.1, 2.8, 10.0)),
    ("a100-8b-tp1", (7.592843, 0.055015, 2.932e-06, 11.4997649, 0.0343508, 8.43e-05), (1.2, 3.5, 3.7, 17.6)),
    ("h100-70b-tp4", (6.427998, 0.061092, 8.906e-07, 15.1975587, 0.0324562, 2.65e-05), (2.5, 8.3, 1.4, 3.7)),
    ("h100-8b-tp1", (2.314969, 0.019863, 7.54e-07, 6.4145175, 0.0104578, 4.17e-05), (3.7, 15.0, 2.2, 7.9)),
    ("h200-70b-tp4", (4.184212, 0.061655, 9.492e-07, 12.1926283, 0.0324323, 1.85e-05), (3.1, 9.1, 2.4, 6.3)),
    ("h200-8b-tp1", (1.404539, 0.020156, 7.819e-07, 4.9489444, 0.0116476, 2.95e-05), (3.5, 11.5, 1.9, 6.1)),
]


@pytest.mark.parametrize(("name", "fit_ms", "errors"), FITS)
def test_the_prior_of_a_table_is_the_published_fit(
    name: str, fit_ms: tuple[float, ...], errors: tuple[float, ...]
) -> None:
    """With the host's time in the two constants."""
    prior, host_ms = load_profile(name).prior, 6.0 if "70b" in name else 2.0
    found_s = (prior.prefill_a_s, prior.prefill_b_s, prior.prefill_c_s, prior.step_d_s, prior.step_e_s, prior.step_f_s)
    a, b, c, d, e, f = fit_ms
    assert [value * 1000 for value in found_s] == pytest.approx([a + host_ms, b, c, d + host_ms, e, f], rel=3e-3)


@pytest.mark.parametrize(("name", "fit_ms", "errors"), FITS)
def test_the_published_fit_is_as_near_as_it_says(
    name: str, fit_ms: tuple[float, ...], errors: tuple[float, ...]
) -> None:
    """The timings between them and the fit differ by the fit's published errors: they speak of the same engine."""
    tables = read_tables(Tables(**{key: Path(f"{key}.csv") for key in ("prefill", "decode")}, rows=name), FOLDER)
    timings, host_s = load_profile(name).timings, 0.006 if "70b" in name else 0.002
    (a, b, c, d, e, f), (prefill_mean, prefill_most, decode_mean, decode_most) = fit_ms, errors
    prefill = [
        (a + k * (b * n + c * n * (n / 2 + h))) / 1000 / (timings.step_s(((n, h),) * k, 0, 0) - host_s) - 1
        for k, n, h, _ in tables.prefill
        if k * n >= 256
    ]
    decode = [
        (d + k * (e + f * each)) / 1000 / (timings.step_s((), k, k * each) - host_s) - 1 for k, each, _ in tables.decode
    ]
    for off, mean, most in ((prefill, prefill_mean, prefill_most), (decode, decode_mean, decode_most)):
        assert 100 * sum(map(abs, off)) / len(off) == pytest.approx(mean, abs=0.4)
        assert 100 * max(map(abs, off)) == pytest.approx(most, abs=1.7)


def test_the_prior_of_coefficients_is_the_coefficients(tmp_path: Path) -> None:
    """Host time in both constants; milliseconds in the file, seconds here."""
    file = tmp_path / "mine.yaml"
    file.write_text(LINEAR + SIZES + "gpus: 2\nhost_ms: 5\nhandoff_ms: 40\nnoise_sd: 0.1\n", encoding="utf-8")
    profile = load_profile(str(file))
    prior = profile.prior
    assert (profile.name, profile.gpus, profile.handoff_s, profile.noise_sd) == ("mine", 2, 0.04, 0.1)
    assert (prior.prefill_a_s, prior.prefill_b_s, prior.prefill_c_s) == pytest.approx((0.015, 1e-4, 2e-9))
    assert (prior.step_d_s, prior.step_e_s, prior.step_f_s) == pytest.approx((0.025, 1e-4, 1e-8))
    assert profile.timings.step_s(((100, 50),), 3, 700) == pytest.approx(
        prior.mixed_step_mean_s(100, 3, 700, cached_tokens=50)
    )


def test_tables_of_ones_own_lie_beside_the_file(tmp_path: Path) -> None:
    """Without mixed rows, and without a column that says whose the rows are."""
    (tmp_path / "p.csv").write_text(PREFILL, encoding="utf-8")
    (tmp_path / "d.csv").write_text(DECODE, encoding="utf-8")
    file = tmp_path / "mine.yml"
    file.write_text("tables: {prefill: p.csv, decode: d.csv}\nhost_ms: 4\n" + SIZES, encoding="utf-8")
    timings = load_profile(str(file)).timings
    assert timings.step_s(((200, 1000),), 0, 0) == pytest.approx(0.045)
    assert timings.step_s((), 8, 4400) == pytest.approx(0.004 + (0.013 + 0.021) / 2)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("h100-8b-tp1", dict.fromkeys(Role, "h100-8b-tp1")),
        (
            "prefill=h100-8b-tp1,decode=a100-8b-tp1",
            {Role.PREFILL: "h100-8b-tp1", Role.DECODE: "a100-8b-tp1"},
        ),
        (
            "decode = a100-8b-tp1, unified = h200-8b-tp1",
            {Role.DECODE: "a100-8b-tp1", Role.UNIFIED: "h200-8b-tp1"},
        ),
    ],
)
def test_each_role_has_its_profile(text: str, names: dict[Role, str]) -> None:
    """One for all of them, or one for each that is named."""
    assert {role: profile.name for role, profile in load_profiles(text).items()} == names


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x", f"there is no profile 'x': give the path of a YAML file or one of {', '.join(NAMES)}"),
        ("", f"there is no profile '': give the path of a YAML file or one of {', '.join(NAMES)}"),
        ("none.yaml", "cannot read none.yaml: No such file or directory; give the path of a profile"),
        ("prefil=h100-8b-tp1", "'prefil' is no role: give profiles as prefill=A,decode=B or as one for all"),
        (
            "prefill=h100-8b-tp1,h100-8b-tp1",
            "'h100-8b-tp1' is no role: give profiles as prefill=A,decode=B or as one for all",
        ),
        ("decode=h100-8b-tp1,decode=h100-8b-tp1", "decode has two profiles: keep one of them"),
    ],
)
def test_a_wrong_name_is_told_the_right_ones(text: str, sentence: str) -> None:
    """In one sentence."""
    with pytest.raises(ConfigError) as raised:
        load_profiles(text)
    assert str(raised.value) == sentence


TABLES = "tables: {prefill: p.csv, decode: d.csv}\n" + SIZES


@pytest.mark.parametrize(
    ("profile", "prefill", "decode", "sentence"),
    [
        (SIZES, PREFILL, DECODE, "must hold exactly one of linear, tables"),
        (LINEAR + TABLES, PREFILL, DECODE, "must hold exactly one of linear, tables"),
        (LINEAR + SIZES + "host: 3\n", PREFILL, DECODE, "unknown key 'host': did you mean 'host_ms'?"),
        (
            LINEAR.replace("step_d_s", "step_d"),
            PREFILL,
            DECODE,
            "unknown key 'linear.step_d': did you mean 'step_d_s'?",
        ),
        (LINEAR.replace(" step_d_s: 0.02,", "") + SIZES, PREFILL, DECODE, "linear.step_d_s is missing: add it"),
        (LINEAR + SIZES + "gpus: 0\n", PREFILL, DECODE, "gpus: input should be greater than 0 (got 0)"),
        (LINEAR + SIZES + "noise_sd: .nan\n", PREFILL, DECODE, "noise_sd: input should be"),
        ("- 1\n", PREFILL, DECODE, "must be a mapping with the keys linear, tables, kv_capacity_tokens"),
        ("a: [\n", PREFILL, DECODE, "is not valid YAML"),
        (TABLES.replace("p.csv", "q.csv"), PREFILL, DECODE, "q.csv: No such file or directory; give the path of a CSV"),
        (TABLES.replace("}", ", rows: x}"), PREFILL, DECODE, "p.csv has no column profile: its first line must name"),
        (TABLES, PREFILL.replace("step_ms", "ms"), DECODE, "p.csv has no column step_ms: its first line must name"),
        (TABLES, PREFILL, DECODE.splitlines()[0], "d.csv holds no rows: add some"),
        (TABLES, PREFILL, DECODE + "8,1000,22\n", "d.csv, line 6 says again what an earlier line says"),
        (
            TABLES,
            PREFILL,
            DECODE + "8,many,22\n",
            "d.csv, line 6: invalid literal for int() with base 10: 'many'; give",
        ),
        (TABLES, PREFILL, DECODE + "8,2000\n", "d.csv, line 6: "),
        (
            TABLES,
            PREFILL,
            DECODE + "8,2000,-1\n",
            "d.csv, line 6: streams and context_tokens must be 1 or more, step_ms",
        ),
        (TABLES, PREFILL, DECODE + "16,2000,30\n", "d.csv must hold at least two context_tokens for each number of"),
        (TABLES, PREFILL.replace("2,100", "4,100"), DECODE, "p.csv must hold a row of two prompts of half the"),
        (
            TABLES,
            PREFILL.replace("1,200,1000", "1,300,1000"),
            DECODE,
            "p.csv must hold a row with cached_tokens beside",
        ),
        (TABLES, "\n".join(PREFILL.splitlines()[:2]), DECODE, "p.csv must hold rows of one prompt without cached"),
    ],
)
def test_a_bad_file_gets_one_sentence(tmp_path: Path, profile: str, prefill: str, decode: str, sentence: str) -> None:
    """That names the file and says what to change."""
    (tmp_path / "p.csv").write_text(prefill, encoding="utf-8")
    (tmp_path / "d.csv").write_text(decode, encoding="utf-8")
    file = tmp_path / "mine.yaml"
    file.write_text(profile, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_profile(str(file))
    assert sentence in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)
