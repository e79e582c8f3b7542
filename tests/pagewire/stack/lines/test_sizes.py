import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pagewire.config import ServeConfig
from pagewire.stack.lines import sizes
from pagewire.stack.lines.sizes import KeptSizes, Sizes


def test_memory_of_processes_and_of_those_that_they_started_is_measured() -> None:
    code = (
        "import subprocess; data = b'x' * (64 << 20); child = subprocess.Popen(['sleep', '60']); print(flush=True); "
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert 64 << 20 < sizes.measured({process.pid}) < 128 << 20
            assert sizes.measured({process.pid, os.getsid(0)}) > sizes.measured({process.pid})
            assert sizes.measured(frozenset()) == 0
        finally:
            os.killpg(process.pid, 9)


def test_sizes_that_cannot_be_written_leave_no_files(tmp_path: Path) -> None:
    path = tmp_path / "lines.json"
    path.mkdir()  # nothing can take its place
    KeptSizes(path).keep(ServeConfig(model="m", device="cpu"), Sizes(5, 3))
    assert list(tmp_path.iterdir()) == [path]


def test_sizes_are_kept_by_model_and_flags_and_a_broken_file_costs_only_them(tmp_path: Path) -> None:
    kept = KeptSizes(tmp_path / "new" / "lines.json")
    config = ServeConfig(model="m", device="cpu")
    assert kept.of(config) is None
    kept.keep(config, Sizes(5, 3))
    kept.keep(replace(config, max_num_seqs=3), Sizes(7, 4))
    again = KeptSizes(tmp_path / "new" / "lines.json")
    assert again.of(config) == Sizes(5, 3, is_measured=True)
    assert again.of(replace(config, max_num_seqs=3)) == Sizes(7, 4, is_measured=True)
    assert again.of(replace(config, kv_cache_memory_bytes=2**20)) is None
    for text in ("", "[]", '{"x": 3}', "\x00"):
        (tmp_path / "new" / "lines.json").write_text(text)
        assert again.of(config) is None
    again.keep(config, Sizes(6, 3))
    assert again.of(config) == Sizes(6, 3, is_measured=True)


def test_estimates_follow_from_files_and_flags(tmp_path: Path) -> None:
    config = ServeConfig(model="no-such-model", device="cpu", kv_cache_memory_bytes=2**30)
    assert sizes.estimated(config).ready - sizes.estimated(replace(config, kv_cache_memory_bytes=1)).ready == 2**30 - 1
    assert sizes.estimated(replace(config, data_parallel_size=2)).ready > sizes.estimated(config).ready
    assert sizes.estimated(config).asleep < sizes.estimated(config).ready
    assert sizes.room(config, 100) == 90 and sizes.room(replace(config, models_memory=7), 100) == 7


def test_on_cuda_a_line_takes_its_share_of_the_device(monkeypatch) -> None:
    monkeypatch.setattr(sizes, "device_memory", lambda: 1000)
    config = ServeConfig(device="cuda", gpu_memory_utilization=0.4)
    assert sizes.estimated(config).ready == 400
    assert sizes.room(config, 5) == 1000


def test_files_that_say_what_no_model_does_leave_its_size_unknown(tmp_path: Path) -> None:
    config = ServeConfig(model=str(tmp_path), device="cpu")
    for text in ('{"text_config": 5}', '{"architectures": 3}', '{"num_attention_heads": 4, "hidden_size": "a"}'):
        (tmp_path / "config.json").write_text(text)
        assert sizes.facts(config) is None and sizes.estimated(config).ready > 0
