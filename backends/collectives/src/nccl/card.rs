//! A rank's GPU: buffers of an operation in its memory, and sums there.

use super::super::Element;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Shape, Tensor};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Bytes;
use cubecl::client::Client;
use cubecl::cuda::CudaRuntime;
use cubecl::future::block_on;
use cubecl::server::Handle;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::CudaContext;
use firebrick_device::device::cube_probe;
use firebrick_device::{Error, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// An NVIDIA GPU that `CubeCL` has open.
pub(super) struct Card {
    client: Client,
    device: CubeDevice,
    /// The primary context, which `CubeCL` has too.
    pub context: Arc<CudaContext>,
    /// Unique id of the GPU.
    pub uuid: [u8; 16],
}

impl fmt::Debug for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Card({:?})", self.device)
    }
}

/// Bytes in a GPU's memory.
#[derive(Clone)]
pub(super) struct Buffer {
    handle: Handle,
    bytes: usize,
}

impl Buffer {
    /// The values of a tensor, where they lie; a copy where they are not one behind the other.
    pub fn new(tensor: Tensor<1>) -> Self {
        let tensor = tensor.try_into_primitive::<Cube>();
        let tensor = into_contiguous(tensor.expect("a tensor of this GPU"));
        Self { bytes: tensor.meta.num_elements() * tensor.dtype.size(), handle: tensor.handle }
    }
}

/// Address of a buffer. While this lives its memory is neither moved nor given to others.
pub(super) struct Place {
    pub at: u64,
    _held: Box<dyn Any>,
}

/// The type of values as tensors have it.
pub(super) fn dtype_of(element: Element) -> DType {
    match element {
        Element::F32 => DType::F32,
        Element::F64 => DType::F64,
        Element::Bf16 => DType::BF16,
        Element::F16 => DType::F16,
        Element::Byte => unreachable!("tensors are of floats, and bytes have no sum"),
    }
}

impl Card {
    /// The GPU of a device.
    ///
    /// # Errors
    /// Why it cannot be used, with what to do.
    pub fn new(device: &Device) -> Result<Self, String> {
        let no_gpu = || "its device is not an NVIDIA GPU; set `device: cuda` on every rank".to_owned();
        let probe = cube_probe(device).ok_or_else(no_gpu)?;
        let CubeDevice::Cuda(cuda) = &probe.device else {
            return Err(no_gpu());
        };
        let opened = CudaContext::new(cuda.index).and_then(|context| {
            let uuid = context.uuid()?;
            Ok((context, uuid))
        });
        let (context, uuid) = opened.map_err(|error| format!("its GPU's driver gives no context: {error}"))?;
        Ok(Self { client: probe.client, device: probe.device, context, uuid: uuid.bytes.map(|byte| byte as u8) })
    }

    /// Bytes of the host, on the GPU.
    pub fn upload(&self, bytes: Vec<u8>) -> Buffer {
        Buffer { bytes: bytes.len(), handle: self.client.create(Bytes::from_bytes_vec(bytes)) }
    }

    /// The first values of a buffer as a tensor, which has its memory.
    pub fn tensor(&self, buffer: Buffer, len: usize, dtype: DType) -> Tensor<1> {
        let besides = buffer.bytes - len * dtype.size();
        Tensor::from_primitive::<Cube>(CubeTensor::new_contiguous(
            self.client.clone(),
            self.device.clone(),
            Shape::from([len]),
            buffer.handle.offset_end(besides as u64),
            dtype,
        ))
    }

    /// Memory that nothing was written to.
    pub fn room(&self, bytes: usize) -> Buffer {
        Buffer { bytes, handle: self.client.empty(bytes) }
    }

    /// Addresses of buffers, after all that this thread asked the GPU for until now.
    ///
    /// # Errors
    /// If a buffer was never allocated, or what should be in it was not computed.
    pub fn places(&self, buffers: &[&Buffer]) -> Result<Vec<Place>> {
        let place = |buffer: &&Buffer| {
            let handle = buffer.handle.clone();
            let held = self
                .client
                .get_resource::<<CudaRuntime as Runtime>::Server>(handle)
                .map_err(|error| Error::device(&error))?;
            Ok(Place { at: held.resource().ptr, _held: Box::new(held) })
        };
        let places = buffers.iter().map(place).collect::<Result<_>>()?;
        let handles = buffers.iter().map(|buffer| &buffer.handle);
        let computed = block_on(self.client.sync_buffers(handles));
        computed.map_err(|error| Error::device(&error))?;
        Ok(places)
    }

    /// The sum of as many blocks as there are ranks, the first plus the second plus the third. Half precision is summed
    /// in f32 and rounded once.
    pub fn sum(&self, blocks: &Buffer, ranks: usize, element: Element) -> Buffer {
        let dtype = dtype_of(element);
        let block = blocks.bytes / ranks / element.bytes();
        let wide = match dtype {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let tensor = self.tensor(blocks.clone(), ranks * block, dtype);
        let mut terms = (0..ranks).map(|rank| tensor.clone().narrow(0, rank * block, block).cast(wide));
        let Some(first) = terms.next() else { unreachable!("a group has a rank") };
        let sum = terms.fold(first, Tensor::add).cast(dtype);
        Buffer::new(sum)
    }

    /// The first bytes of a buffer, on the host.
    ///
    /// # Errors
    /// If the GPU fails.
    pub fn download(&self, buffer: &Buffer, bytes: usize) -> Result<Vec<u8>> {
        let read = self.client.read_one(buffer.handle.clone());
        let mut read = read.map_err(|error| Error::device(&error))?.to_vec();
        read.truncate(bytes);
        Ok(read)
    }
}
