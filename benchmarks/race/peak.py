"""Peak memory of this process, read alike on both sides; the peer's environment imports it too."""

from pathlib import Path


def peak_rss_gb() -> float:
    """The kernel's high-water mark of resident memory since the process began, GB (1e9 bytes; Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/self/status has no VmHWM")
