"""Whether a server does what its /openapi.json says: `python schemathesis_check.py URL`, in an environment of its own
that has schemathesis. Requests that follow the description and requests that do not, from a fixed seed: none may get a
5xx, a status or a type of content that is not described, or an error in another form."""

from __future__ import annotations

import subprocess
import sys
import tempfile

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
EXAMPLES = 60  # for each path and method
SEED = 15


def main(url: str) -> int:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS)]
    command += ["--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(SEED)]
    command += ["--generation-deterministic", "--no-shrink", "--no-color"]
    command += ["--continue-on-failure", "--request-timeout", "20", "--suppress-health-check", "all"]
    command += ["--header", "Authorization: Bearer root", "--warnings", "off"]
    with tempfile.TemporaryDirectory() as folder:  # where it leaves a cache of its own
        return subprocess.run(command, check=False, cwd=folder).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
