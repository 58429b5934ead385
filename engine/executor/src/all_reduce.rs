//! Gradients of a whole optimizer step, summed over the ranks that computed parts of it.

use super::gradient::Gradient;
use super::gradients::{Gradients, gradient_dtype};
use super::runtime::Runtime;
use burn::tensor::{DType, Device, Tensor};
use firebrick_backends::accounts::Home;
use firebrick_backends::collective::{Element, Flat};
use firebrick_core::Result;
use firebrick_core::world::World;
use firebrick_models::Decoder;
use firebrick_models::unit::ParamSpec;

impl Gradients {
    /// Adds up the gradients of all ranks that have the same weights, in their order, unit by unit: afterwards these
    /// have the same ones, to the bit. A rank that had no micro-batch contributes zeros.
    ///
    /// # Errors
    /// If a copy fails, or a rank has failed or is gone.
    pub fn all_reduce(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        for unit in decoder.units() {
            self.sum_parts(decoder, unit.range.clone(), runtime)?;
        }
        let world = runtime.world().replicas();
        if world.is_solo() {
            return Ok(());
        }
        self.finish()?;
        let specs: Vec<[usize; 2]> = decoder.specs().map(ParamSpec::rows_cols).collect();
        let contributed: Vec<u8> = (0..specs.len()).map(|index| u8::from(self.has(index))).collect();
        let contributed = world.exchange(contributed)?;
        // units without gradients anywhere are frozen ones
        let has_gradient = |index: &usize| contributed.iter().any(|rank| rank.get(*index) == Some(&1));
        let device = decoder.device();
        let dtype = gradient_dtype(decoder);
        let stays = [self.home, world.buffers_home()] == [Home::Device; 2];
        for unit in decoder.units() {
            let params: Vec<usize> = unit.range.clone().filter(has_gradient).collect();
            if params.is_empty() {
                continue;
            }
            let grads: Vec<_> = params.iter().map(|&i| (self.take_own(i), specs[i])).collect();
            let sums = if stays {
                sum_on_device(grads, (device, dtype), &world)?
            } else {
                sum_on_host(grads, Element::of(dtype), &world)?
            };
            for (index, sum) in params.into_iter().zip(sums) {
                self.put(index, sum, device);
            }
        }
        Ok(())
    }
}

/// The sums of a unit's gradients of all ranks, in one message in host memory. What is absent is zeros.
fn sum_on_host(grads: Vec<(Option<Gradient>, [usize; 2])>, element: Element, world: &World) -> Result<Vec<Gradient>> {
    let mut flat = Vec::with_capacity(grads.len());
    let mut shapes = Vec::with_capacity(grads.len());
    for (gradient, shape) in grads {
        flat.push(match gradient {
            Some(gradient) => Flat::from(gradient.into_host()?),
            None => Flat::zeros(element, shape[0] * shape[1]),
        });
        shapes.push(shape);
    }
    let lengths: Vec<usize> = flat.iter().map(Flat::len).collect();
    let sums = world.all_reduce(Flat::concat(flat))?;
    let sum = |(values, shape): (Flat, [usize; 2])| Gradient::Host(values.into_host_tensor(shape));
    Ok(sums.split(&lengths).zip(shapes).map(sum).collect())
}

/// Sums a unit's gradients of all ranks in a message that stays on the device.
fn sum_on_device(
    grads: Vec<(Option<Gradient>, [usize; 2])>,
    (device, dtype): (&Device, DType),
    world: &World,
) -> Result<Vec<Gradient>> {
    let shapes: Vec<[usize; 2]> = grads.iter().map(|(_, shape)| *shape).collect();
    let values = grads.into_iter().map(|(gradient, [rows, columns])| {
        let len = rows * columns;
        match gradient {
            Some(gradient) => gradient.into_device(device).reshape([len]),
            None => Tensor::<1>::zeros([len], (device, dtype)),
        }
    });
    let sum = world.all_reduce_tensor(Tensor::cat(values.collect(), 0))?;
    let mut start = 0;
    let each = shapes.into_iter().map(|[rows, columns]| {
        let part = sum.clone().narrow(0, start, rows * columns);
        start += rows * columns;
        Gradient::Device(part.reshape([rows, columns]))
    });
    Ok(each.collect())
}
