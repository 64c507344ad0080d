"""The installed command and package as a user meets them: quick, no torch before it is needed, no traceback."""

import subprocess
import sys

import pytest

import rustvllm

CLI = [sys.executable, "-m", "rustvllm.cli.main"]


def run(*argv, **options):
    return subprocess.run([*CLI, *argv], capture_output=True, text=True, timeout=100, check=False, **options)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(flag):
    done = run(flag)
    assert done.returncode == 0
    assert (rustvllm.__version__ if flag == "--version" else "serve") in done.stdout


def python(code, **options):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import rustvllm",
        "import rustvllm; rustvllm.__version__; dir(rustvllm)",
        "from rustvllm import SamplingParams, EngineArgs, AsyncEngineArgs, RequestOutput, CompletionOutput",
        "from rustvllm import LLM, LLMEngine, AsyncLLM",
        "from rustvllm.config import engine_config, hub, model_folder",
        "from rustvllm.cli.serve import make_parser; make_parser()",
        "from rustvllm.cli.main import main; main(['bench', 'step', '--num-running', '1', '--steps', '2'])",
    ],
)
def test_no_torch_before_a_model_is_loaded(code):
    heavy = ("torch", "transformers", "triton")
    printed = python(f"{code}\nimport sys; print([name for name in {heavy} if name in sys.modules])")
    assert printed.splitlines()[-1] == "[]"


def test_lazy_names_are_all_there_and_others_are_not():
    for name in rustvllm.__all__:
        assert getattr(rustvllm, name) is not None
        assert name in dir(rustvllm)
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        _ = rustvllm.LLMM


def test_a_wrong_model_fails_before_torch_is_imported(tmp_path):
    code = (
        "import sys\nfrom rustvllm import LLM\n"
        f"try:\n    LLM({str(tmp_path / 'nothing')!r})\nexcept Exception as error:\n    print(type(error).__name__)\n"
        "print('torch' in sys.modules)"
    )
    assert python(code).split() == ["ModelNotFoundError", "False"]


@pytest.mark.parametrize(
    "where",
    [
        "rustvllm.cli.serve",
        "rustvllm.config.engine_args",
        "rustvllm.server.flags.serve_args",
        "rustvllm.server.launch.serve",
        "parse_known_args",
    ],
)
def test_ctrl_c_in_the_first_moments_leaves_no_traceback(where):
    code = f"""
import os, signal, sys
from rustvllm.cli import main, parser
def interrupt(*_):
    print("interrupted", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
class Finder:
    def find_spec(self, name, *_):
        if name == {where!r}:
            interrupt()
if {where!r} == "parse_known_args":
    parser.FlexibleArgumentParser.parse_known_args = interrupt
sys.meta_path.insert(0, Finder())
sys.exit(main.main(["serve", "/no/such/folder"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "interrupted", "")


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["serve", "/no/such/folder"], 1, "there is no folder /no/such/folder"),
        (["serve", "gpt2"], 1, "cannot get the model openai-community/gpt2 (asked for as gpt2)"),
        (["serve", "--max-num-seqs", "0"], 1, "--max-num-seqs must be at least 1, got 0"),
        (["serve", "--max-modle-len", "5"], 2, "did you mean --max-model-len?"),
        (["serve", "--stream-interval", "2"], 2, "not supported yet"),
        (["bench", "step", "--num-running", "0"], 2, "must be whole numbers between 1 and 32768"),
        (["bench", "trace", "/no/such/trace"], 1, "cannot read /no/such/trace"),
        (["srve"], 2, "unknown command 'srve'"),
        ([], 2, ""),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(argv, code, message, tmp_path):
    import os

    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run(*argv, *(["--port", "0"] if argv[:1] == ["serve"] else []), env=env)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
