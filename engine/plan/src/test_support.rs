//! Devices for tests.

use firebrick_spec::{Backend, DeviceProfile, KernelTable, Operation, QuantizedProduct};

/// An average device of a backend, with kernels like those that `firebrick-backends` has there.
pub(crate) fn device(backend: Backend) -> DeviceProfile {
    DeviceProfile::assumed(backend).with_kernels(kernels(backend))
}

/// Kernels like those that `firebrick-backends` has on a backend.
pub(crate) fn kernels(backend: Backend) -> KernelTable {
    let on_cpu = backend == Backend::Cpu;
    let used = Operation::ALL.into_iter().filter(|operation| match operation {
        Operation::AdamW | Operation::Block8 | Operation::Embedding => !on_cpu,
        Operation::Attention => matches!(backend, Backend::Cpu | Backend::Cuda),
        _ => true,
    });
    let product = QuantizedProduct { max_fused_rows: if on_cpu { usize::MAX } else { 64 }, tensor_cores: false };
    let table = KernelTable::new(used).with_quantized(product, product);
    if on_cpu { table } else { table.with_vocabulary_tile(8192) }
}
