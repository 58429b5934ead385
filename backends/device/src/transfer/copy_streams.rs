//! Copies beside kernels, on CUDA. (Builds without it have `no_copy_streams`.)
//!
//! `CubeCL` gives every thread a stream, and [`Stream::enter`] moves calls of a thread to another one: tensors stay on
//! their thread. Copies to the device have one stream of the process, copies to the host another, so that neither waits
//! for the other direction.
//!
//! **Order.** A call of one stream that names a buffer of another waits on the device, by an event, for all that the
//! other stream was asked for until then; but only if the buffer was allocated after the last such wait
//! (`MultiStream::update_shared_bindings`). A buffer that was written to since it was allocated is no reason to wait.
//! So nothing here relies on it: [`order`] allocates a few bytes on the one stream and writes to them on the other,
//! which is such a call about a buffer that is always new.
//!
//! **Memory.** Each stream has memory pools of its own, and a pool reuses memory in its own stream's order. All device
//! memory of a copy is therefore the computing stream's: copies fill and read it, and allocate nothing but those few
//! bytes. Memory that a copy of another stream uses is not given to others, nor written to in place, before the copy is
//! through: `CubeCL` keeps what a call of another stream names until an event of that stream is reached, and a read
//! keeps its tensor until it was waited for.

use crate::device::{Backend, cube_probe};
use crate::{Error, Result};
use burn::backend::Cube;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_cubecl::CubeDevice;
use burn_cubecl::cubecl::client::Client;
use burn_cubecl::cubecl::server::CopyDescriptor;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use burn_std::Bytes;
use burn_std::stream::{Stream, StreamId};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::LazyLock;
use std::task::Poll;

/// A pending read of a tensor: its first poll asks the device for the copy.
pub(super) type Reading = Pin<Box<dyn Future<Output = Result<TensorData>> + Send>>;

/// Copies to the device.
static UP: LazyLock<Stream> = LazyLock::new(Stream::new);
/// Copies to the host.
static DOWN: LazyLock<Stream> = LazyLock::new(Stream::new);
/// Bytes of the buffer that orders two streams.
const MARK: usize = 4;

/// The stream that the calling thread computes on.
fn computing() -> Stream {
    Stream::from_id(StreamId::current())
}

/// Work of `later` from now on waits for the work of `earlier` so far, on the device.
fn order(client: &Client, earlier: Stream, later: Stream) {
    let mark = earlier.enter(|| client.empty(MARK));
    later.enter(|| client.write(&mark, Bytes::from_bytes_vec(vec![0; MARK])));
}

/// A device whose copies run beside its kernels.
#[derive(Clone)]
pub(super) struct CopyStreams {
    client: Client,
    device: CubeDevice,
}

impl fmt::Debug for CopyStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CopyStreams({:?})", self.device)
    }
}

impl CopyStreams {
    /// `None` where copies and kernels share one queue.
    pub fn new(device: &Device) -> Option<Self> {
        let probe = cube_probe(device)?;
        let beside = match probe.device {
            CubeDevice::Cuda(_) => Backend::Cuda.overlaps_copies(),
            _ => false,
        };
        beside.then_some(Self { client: probe.client, device: probe.device })
    }

    /// A copy of a matrix to the host, after all that the calling thread asked for until now.
    #[allow(clippy::unused_self, reason = "there are no streams without it")]
    pub fn read_matrix(&self, matrix: Tensor<2>) -> Reading {
        let plain = if matrix.device().is_autodiff() { matrix.inner() } else { matrix };
        let opened = plain.try_into_primitive::<Cube>();
        read(opened.expect("the device was checked before"))
    }

    /// A copy of indices to the host, likewise.
    #[allow(clippy::unused_self, reason = "there are no streams without it")]
    pub fn read_indices(&self, indices: Tensor<1, Int>) -> Reading {
        let opened = indices.try_into_primitive::<Cube>();
        read(opened.expect("the device was checked before"))
    }

    /// Memory for data on the device. It may have been used by work that the device was asked for until now: copies
    /// into it wait for that, and for nothing since.
    pub fn make_room(&self, data: Vec<TensorData>) -> Incoming {
        let (mut room, mut bytes) = (Vec::new(), Vec::new());
        for data in data {
            let (data, shape, dtype) = data.into_parts();
            let (client, device) = (self.client.clone(), self.device.clone());
            room.push(empty_device_contiguous_dtype(client, device, shape, dtype));
            bytes.push(data);
        }
        order(&self.client, computing(), *UP);
        Incoming { client: self.client.clone(), room, bytes }
    }
}

fn read(tensor: CubeTensor) -> Reading {
    let tensor = into_contiguous_aligned(tensor);
    let computed = computing();
    Box::pin(async move {
        let (shape, dtype) = (tensor.meta.shape().clone(), tensor.dtype);
        let descriptor = CopyDescriptor::new(
            tensor.handle.clone().binding(),
            shape.clone(),
            tensor.meta.strides().clone(),
            dtype.size(),
        );
        order(&tensor.client, computed, *DOWN);
        let reading = DOWN.enter(|| tensor.client.read_one_tensor_async(descriptor));
        asked_for().await;
        let bytes = reading.await;
        // until here its memory is not written to in place
        drop(tensor);
        read_out(bytes.map(|bytes| TensorData::from_bytes(bytes, shape, dtype)))
    })
}

fn read_out<E: std::error::Error + 'static>(data: std::result::Result<TensorData, E>) -> Result<TensorData> {
    data.map_err(|e| Error::device(&e))
}

/// Pending once: whoever polls first has asked for the copy, whoever polls again waits for it. `CubeCL`'s read blocks
/// when polled.
async fn asked_for() {
    let mut polled = false;
    poll_fn(move |context| {
        if std::mem::replace(&mut polled, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Data on their way to the device.
pub(super) struct Incoming {
    client: Client,
    room: Vec<CubeTensor>,
    /// Parts still to be requested.
    bytes: Vec<Bytes>,
}

impl fmt::Debug for Incoming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Incoming(started: {})", self.bytes.is_empty())
    }
}

impl Incoming {
    /// Asks for the copies, once.
    pub fn start(&mut self) {
        for (room, bytes) in self.room.iter().zip(std::mem::take(&mut self.bytes)) {
            UP.enter(|| self.client.write(&room.handle, bytes));
        }
    }

    /// The data. What the calling thread asks for from now on waits for them.
    pub fn arrive(mut self) -> Vec<Tensor<2>> {
        self.start();
        order(&self.client, *UP, computing());
        let there = self.room.into_iter();
        there.map(Tensor::from_primitive::<Cube>).collect()
    }
}
