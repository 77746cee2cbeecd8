"""The package: cheap to import, and a clear message when its extra is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dllm_sched_hf


def test_every_public_name_resolves():
    assert dir(dllm_sched_hf) == dllm_sched_hf.__all__ == sorted(dllm_sched_hf.__all__)
    old = {"D2FOutput": "DecodeOutput"}
    for name in dllm_sched_hf.__all__:
        assert getattr(dllm_sched_hf, name).__name__ == old.get(name, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nothing"):
        _ = dllm_sched_hf.nothing


def _python(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_import_is_cheap():
    done = _python("import sys, dllm_sched_hf; print({'torch', 'numpy'} & set(sys.modules))")
    assert done.stdout.strip() == "set()"


def test_missing_extra_is_named():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import dllm_sched_hf\n"
        "try: dllm_sched_hf.D2FEngine\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert "install dllm-sched[hf]" in _python(code).stdout
