"""The router `smg`, unmodified, before two servers of ours: `smg_router.py URL URL PID`. PID is that of the second one,
and is killed half-way."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WORKERS, PID = sys.argv[1:3], int(sys.argv[3])
WORDS = ("oak", "ash", "elm", "fir", "yew", "box")
PREFIXES = {word: f"{word.title()}s are trees. " + f"Every {word} in this wood is counted. " * 40 for word in WORDS}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


PORT = free_port()


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def ask(word, ending):
    body = {"model": "paced", "prompt": PREFIXES[word] + ending, "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]


def served(worker):
    """How many requests a worker has answered."""
    found = re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)$", get(f"{worker}/metrics"), re.M)
    return sum(float(each) for each in found)


def ready(router):
    until = time.monotonic() + 60
    while True:
        assert router.poll() is None, "the router ended"
        try:
            return ask(WORDS[0], "Are you there?")
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < until, "the router does not answer"
            time.sleep(0.1)


def sticks():
    """Each prefix goes to one server, where it is cached; and both have some."""
    places = {}
    for turn in range(4):
        for word in WORDS:
            before = [served(worker) for worker in WORKERS]
            usage = ask(word, f"Turn {turn}.")
            after = [served(worker) for worker in WORKERS]
            (place,) = [at for at in range(len(WORKERS)) if after[at] > before[at]]
            places.setdefault(word, set()).add(place)
            if turn:
                assert usage["prompt_tokens_details"]["cached_tokens"] > 100, usage
    assert all(len(found) == 1 for found in places.values()), places
    assert set.union(*places.values()) == {0, 1}, places


def survives():
    """One server dies: everybody is answered all the same."""
    os.kill(PID, signal.SIGKILL)
    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(lambda at: ask(WORDS[at % len(WORDS)], f"After {at}."), range(60)))
    assert len(told) == 60 and all(usage["completion_tokens"] == 4 for usage in told)


command = [str(Path(sys.executable).parent / "smg"), "launch", "--policy", "cache_aware", "--worker-urls", *WORKERS]
command += ["--host", "127.0.0.1", "--port", str(PORT), "--prometheus-port", str(free_port())]
command += ["--prometheus-host", "127.0.0.1", "--health-check-interval-secs", "1", "--log-level", "warn"]
command += ["--disable-tokenizer-autoload"]
router = subprocess.Popen(command, stdout=sys.stderr)
try:
    ready(router)
    sticks()
    survives()
finally:
    router.kill()
    router.wait()
sys.stdout.write("all is well\n")
