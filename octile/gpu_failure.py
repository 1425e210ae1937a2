"""Failures of a kernel or a GPU, after which a process can compute nothing more on that GPU."""

# what the driver says of them (cuGetErrorString), in exceptions of torch, of Triton and of octile's launches
MESSAGES = (
    "an illegal instruction was encountered",
    "an illegal memory access was encountered",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "unspecified launch failure",
)


def is_gpu_failure(error: BaseException) -> bool:
    """Whether an exception reports that a kernel or a GPU has failed, not that memory or an argument was wrong."""
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def gpu_failure(error: BaseException) -> str:
    """The line that says it: the first of the message, without torch's advice, and how to find the kernel."""
    first = str(error).partition("\n")[0].removeprefix("CUDA error: ")
    return f"the GPU has failed: {first}; CUDA_ENABLE_COREDUMP_ON_EXCEPTION=1 writes a file that names the kernel"
