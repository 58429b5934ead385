//! Devices that are lost: after such an error every call on the device fails, until a new process opens it.

/// Phrases of libraries and drivers, in lower case. Burn hands on their errors as text.
const PHRASES: [&str; 16] = [
    // Burn and CubeCL, of a wgpu device whose callback said so
    "the device is poisoned",
    "the device was poisoned during launch",
    // wgpu-core, `DeviceError::Lost`; wgpu-hal; ash, `vk::Result::ERROR_DEVICE_LOST` by its `Debug` and its `Display`
    "device is lost",
    "device was lost",
    "error_device_lost",
    "the logical device has been lost",
    // wgpu, before its callback: a lost device makes invalid buffers without an error, which their first use reports
    "label is invalid",
    // CUDA: errors that "leave the process in an inconsistent state", as its documentation of `CUresult` says
    "cuda_error_illegal_address",
    "cuda_error_launch_timeout",
    "cuda_error_assert",
    "cuda_error_hardware_stack_error",
    "cuda_error_illegal_instruction",
    "cuda_error_misaligned_address",
    "cuda_error_launch_failed",
    "cuda_error_ecc_uncorrectable",
    "cuda_error_nvlink_uncorrectable",
];

/// Returns true if an error's text says that the device is lost.
pub fn is_lost(message: &str) -> bool {
    let lower = message.to_ascii_lowercase();
    PHRASES.iter().any(|words| lower.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_std::ExecutionError;

    #[test]
    fn a_lost_device_is_told_from_one_that_failed_once() {
        let burn = ExecutionError::device_poisoned("Destroyed: ").to_string();
        for lost in [
            &*burn,
            "Parent device is lost",
            "wgpu error: Validation Error\n\nCaused by:\n  In Queue::write_buffer\n    Buffer with '' label is invalid",
            "DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal memory access was encountered\")",
        ] {
            assert!(is_lost(lost), "{lost}");
        }
        for other in
            ["CUDA_ERROR_INVALID_VALUE", "out of device memory allocating 8388608 bytes", "the kernel does not compile"]
        {
            assert!(!is_lost(other), "{other}");
        }
    }
}
