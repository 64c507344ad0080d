"""Waiting for a thread does not time out because the process was stopped meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time

from rustvllm.process.patient_join import patient_join


def test_it_returns_when_the_thread_has_ended_and_after_the_time_if_it_has_not():
    release = threading.Event()
    thread = threading.Thread(target=release.wait, daemon=True)
    thread.start()
    began = time.monotonic()
    assert patient_join(thread, 0.25) is False
    assert time.monotonic() - began >= 0.25
    release.set()
    assert patient_join(thread, 10.0) is True
    assert patient_join(thread, 0.0) is True
    assert patient_join(threading.current_thread(), 10.0) is False
    assert patient_join(threading.Thread(target=print), 10.0) is True, "one that was not started"


PROGRAM = """
import threading, time
from rustvllm.process.patient_join import patient_join
def work():
    for _ in range(6):
        time.sleep(0.1)
thread = threading.Thread(target=work, daemon=True)
thread.start()
print("waits", flush=True)
print(patient_join(thread, 1.5), flush=True)
"""


def test_a_pause_does_not_use_up_the_time():
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        time.sleep(0.15)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        assert process.stdout.readline() == "True\n"
