"""Tests of the crates with `unsafe` under AddressSanitizer, ThreadSanitizer and Miri.

    tests/campaigns/run sanitizers [address] [thread] [miri]

- `address` needs Rust's stable toolchain.
- `thread` needs the standard library's source too (`rustup component add rust-src`): a library that is not instrumented
  hides its locks, and races are reported that are none.
- `miri` needs a nightly toolchain with Miri (`rustup toolchain install nightly --component miri,rust-src`). It cannot run Burn,
  and so no kernel: it runs the tests of crates without Burn.

What a machine lacks is reported as skipped, and so is a kind that is not asked for.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRAPPER = ROOT / "tests/campaigns/support/instrument"
UNSAFE = ["firebrick-device", "firebrick-collectives", "firebrick-kernels"]
PLAIN = ["firebrick-spec", "firebrick-metadata", "firebrick-arch", "math-answer"]
MIXED = "-Cunsafe-allow-abi-mismatch=sanitizer"


def packages(names):
    return [word for name in names for word in ("-p", name)]


def cargo(kind, words, **environment):
    folder = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "sanitizers" / kind
    variables = dict(os.environ, CARGO_TARGET_DIR=str(folder), **environment)
    return subprocess.run(["cargo", *words], cwd=ROOT, env=variables).returncode == 0


def output(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def address():
    flags = {"INSTRUMENT": "|".join(UNSAFE), "INSTRUMENT_FLAGS": f"-Zsanitizer=address {MIXED}"}
    words = ["test", "--no-default-features", "--no-fail-fast", "--lib", *packages(UNSAFE)]
    # a test asks for more than there is
    options = {"ASAN_OPTIONS": "allocator_may_return_null=1"}
    return cargo("address", words, RUSTC_WRAPPER=str(WRAPPER), **flags, **options)


def thread():
    source = Path(output("rustc", "--print", "sysroot")) / "lib/rustlib/src/rust/library/Cargo.lock"
    if not source.is_file():
        return f"there is no {source}: rustup component add rust-src"
    host = output("rustc", "--print", "host-tuple")
    words = ["-Zbuild-std", "test", "--no-default-features", "--no-fail-fast", "--lib", "--target", host, *packages(UNSAFE)]
    return cargo("thread", words, RUSTC_BOOTSTRAP="1", RUSTFLAGS="-Zsanitizer=thread")


def miri():
    if output("cargo", "+nightly", "miri", "--version") is None:
        return "there is no Miri: rustup toolchain install nightly --component miri,rust-src"
    return cargo("miri", ["+nightly", "miri", "test", "--lib", *packages(PLAIN)], MIRIFLAGS="-Zmiri-disable-isolation")


def main():
    kinds = {"address": address, "thread": thread, "miri": miri}
    asked = sys.argv[1:] or list(kinds)
    if set(asked) - set(kinds):
        sys.exit(__doc__)
    counts = {"passed": 0, "failed": 0, "skipped": len(kinds) - len(asked)}
    for kind in asked:
        result = kinds[kind]()
        found = "skipped" if isinstance(result, str) else "passed" if result else "failed"
        counts[found] += 1
        print(f"{kind}: {found}{f' ({result})' if isinstance(result, str) else ''}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items() if count or what != "skipped"))
    sys.exit(counts["failed"] > 0)


main()
