"""The installed command and package as a user meets them: quick, no torch before it is needed, no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rustvllm
from rustvllm.config.hub import embedded_model_path

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
        (["serve", "/no/such/folder"], 1, "there is no folder and no GGUF file /no/such/folder"),
        (["serve", "gpt2"], 1, "cannot get the model openai-community/gpt2 (asked for as gpt2)"),
        (["serve", "--max-num-seqs", "0"], 1, "--max-num-seqs must be at least 1, got 0"),
        (["serve", "--max-modle-len", "5"], 2, "did you mean --max-model-len?"),
        (["serve", "--cpu-offload-gb", "2"], 2, "not supported yet"),
        (["bench", "step", "--num-running", "0"], 2, "must be whole numbers between 1 and 32768"),
        (["bench", "trace", "/no/such/trace"], 1, "cannot read /no/such/trace"),
        (["srve"], 2, "unknown command 'srve'"),
        ([], 2, ""),
    ],
)
def test_mistakes_end_with_a_message_and_no_traceback(argv, code, message, tmp_path):
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run(*argv, *(["--port", "0"] if argv[:1] == ["serve"] else []), env=env)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


SHORT = [
    ["inspect", str(embedded_model_path())],
    ["collect-env"],
    ["serve", "--help"],
    ["bench", "step", "--steps", "1", "--num-running", "1"],
    ["trace", "Once", "--max-tokens", "1", "--num-gpu-blocks-override", "64"],
]


@pytest.mark.parametrize("argv", SHORT, ids=lambda argv: argv[0])
def test_the_reader_of_the_output_has_gone(argv):
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        done = subprocess.run([*CLI, *argv], stdout=theirs, stderr=subprocess.PIPE, timeout=100, check=False)
    finally:
        os.close(theirs)
    assert (done.returncode, done.stderr) == (141, b""), "as SIGPIPE ends a command"


@pytest.mark.parametrize("argv", SHORT, ids=lambda argv: argv[0])
def test_no_room_for_the_output(argv):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*CLI, *argv], stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    message = f"rustvllm {argv[0]}: error: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)


# The simulated executor writes the same way, and saves importing torch.
@pytest.mark.parametrize(
    ("encoding", "executor"), [("ascii", "auto"), ("ascii:surrogateescape", "sim"), ("latin-1", "sim")]
)
def test_a_terminal_that_lacks_characters_gets_a_question_mark(encoding, executor):
    argv = ["trace", "日本", "--max-tokens", "1", "--num-gpu-blocks-override", "64", "--executor", executor]
    done = run(*argv, env=os.environ | {"PYTHONIOENCODING": encoding}, encoding="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "request-1  '??' ???" in done.stdout


@pytest.mark.parametrize("argv", [["serve"], ["inspect", "x"], ["run-batch", "-i", "x", "-o", "y"], ["trace", "x"]])
def test_a_wrong_variable_that_imports_read_is_a_message(argv):
    done = run(*argv, env=os.environ | {"RUSTVLLM_LOGGING_LEVEL": "loud"})
    assert done.returncode == 1
    assert done.stderr.startswith(f"rustvllm {argv[0]}: error: environment variable RUSTVLLM_LOGGING_LEVEL must be")
    assert len(done.stderr.splitlines()) == 1
