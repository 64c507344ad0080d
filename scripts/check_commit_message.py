"""Checks a commit's message before git takes it, or those of commits that exist.

    scripts/check_commit_message.py FILE          as the hook commit-msg: FILE holds the message, the index the change
    scripts/check_commit_message.py --range A..B  every commit in a range, without merges

A message is a subject of at most 72 characters that begins with a verb in the imperative and names no folder of a
machine; a change of more than 200 lines also has a body that says why and what was measured. `make hooks` installs it.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_SUBJECT = 72
MAX_LINES_WITHOUT_BODY = 200
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|mnt|Users)/")
NOT_IMPERATIVE = re.compile(r"^(?:\w+(?:ed|ing)|\w+s(?<!ss)(?<!us)(?<!is))$", re.IGNORECASE)
IMPERATIVES = {
    "embed",
    "feed",
    "need",
    "seed",
    "speed",
    "shed",
    "bring",
    "string",
    "ring",
    "sing",
    "alias",
    "bias",
    "process",
}


def faults(message: str, num_lines: int) -> list[str]:
    """What is wrong with a message.

    Args:
        message: Subject, and perhaps an empty line and a body; lines that begin with ``#`` are git's.
        num_lines: Added and removed lines of the change.
    """
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0].strip() if lines else ""
    body = "\n".join(lines[1:]).strip()
    found = []
    if not subject:
        return ["the message is empty: begin with a subject such as `Refuse a second Host header`"]
    if len(subject) > MAX_SUBJECT:
        found.append(
            f"the subject has {len(subject)} characters; at most {MAX_SUBJECT}, the rest belongs into the body"
        )
    if subject.startswith("Merge ") or MACHINE_PATH.search(message):
        found.append("the message names a folder or a merge: rebase instead (`git pull --rebase`), and name no folder")
    first = subject.split()[0].rstrip(":,")
    if not first[0].isupper() or subject.endswith("."):
        found.append("begin the subject with a capital letter and end it without a full stop")
    if NOT_IMPERATIVE.match(first) and first.lower() not in IMPERATIVES:
        found.append(f"begin the subject with a verb in the imperative (`Add`, `Refuse`), not with {first!r}")
    if len(lines) > 1 and lines[1].strip():
        found.append("leave the line after the subject empty")
    if num_lines > MAX_LINES_WITHOUT_BODY and not body:
        found.append(
            f"the change has {num_lines} lines, above {MAX_LINES_WITHOUT_BODY}: add a body (why, what was measured)"
        )
    return found


def changed_lines(*arguments: str) -> int:
    """Added and removed lines of a diff; binary files and lock files count nothing."""
    listed = _git("diff", "--numstat", *arguments)
    count = 0
    for row in listed.splitlines():
        added, removed, path = row.split("\t", 2)
        if added != "-" and not path.endswith(".lock"):
            count += int(added) + int(removed)
    return count


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def _check_range(commits: str) -> int:
    num_wrong = 0
    for commit in _git("rev-list", "--no-merges", commits).split():
        message = _git("log", "-1", "--format=%B", commit)
        for fault in faults(message, changed_lines(f"{commit}^", commit)):
            num_wrong += 1
            print(f"{commit[:10]} {message.splitlines()[0][:60]!r}: {fault}")
    return num_wrong


def main() -> int:
    """The command line.

    Returns:
        0 when nothing is wrong, else 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="the message, as git hands it to the hook")
    parser.add_argument("--range", metavar="A..B", help="check commits that exist")
    args = parser.parse_args()
    if (args.file is None) == (args.range is None):
        parser.error("give either a file or --range")
    if args.range is not None:
        return 1 if _check_range(args.range) else 0
    found = faults(args.file.read_text(encoding="utf-8"), changed_lines("--cached"))
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
