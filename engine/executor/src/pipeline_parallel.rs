//! Stages of a model on ranks of their own (Huang et al., 2019, arXiv:1811.06965): rows go from stage to stage, and
//! their gradients back, a micro-batch at a time, in the order of
//! [`one_forward_one_backward`](super::pipeline_schedule::one_forward_one_backward). A stage has no more than one
//! message per micro-batch and direction. While it scores, a stage sends the rows of a micro-batch when the next one
//! has taken those of the one before, so that at most one micro-batch's rows wait there.
//!
//! A tied matrix is on the first stage, as the embedding, and on the last, as the projection. Both add up its gradient,
//! and update it alike.

use super::gradient::Gradient;
use super::gradients::{Gradients, gradient_dtype};
use super::runtime::Runtime;
use crate::batch::MicroBatch;
use burn::tensor::{DType, Tensor};
use firebrick_arch::PipelineStage;
use firebrick_backends::PrecisionExt;
use firebrick_backends::accounts::{Category, Home};
use firebrick_backends::collective::{Element, Flat};
use firebrick_backends::precision::stored_as;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::world::World;
use firebrick_core::{Error, Result};
use firebrick_models::{Arch, Decoder};
use firebrick_plan::Role;

/// Refuses a model that cannot be split into `stages` stages.
///
/// # Errors
/// `Error::Ranks` with the key, the model's role, why not, and what to do instead.
pub fn check_stages(role: Role, arch: &Arch, stages: usize) -> Result<()> {
    PipelineStage::check(arch, stages).map_err(|why| {
        Error::Ranks(format!(
            "memory.pipeline_model_parallel_size: {stages} splits the layers of the {}, but {why}",
            role.name()
        ))
    })
}

/// The stages before and after this one.
#[derive(Clone, Copy)]
pub(super) struct Neighbors<'a> {
    runtime: &'a Runtime,
    pub stage: PipelineStage,
    /// Width of a row.
    hidden: usize,
    /// Type of its elements.
    stored: DType,
}

impl<'a> Neighbors<'a> {
    /// Those of a decoder that is split into stages; `None` if it is not.
    pub fn new(decoder: &Decoder, runtime: &'a Runtime) -> Result<Option<Self>> {
        let (world, arch) = (runtime.world(), decoder.arch());
        match decoder.stage() {
            None => Ok(None),
            Some(stage) if world.pipeline_stage() == Some(stage) => {
                let stored = arch.precision.dtype(decoder.device());
                Ok(Some(Self { runtime, stage, hidden: arch.hidden_size, stored }))
            }
            Some(stage) => Err(Error::Ranks(format!(
                "the model is split into {} stages, and the ranks into {}",
                stage.stages(),
                world.stages()
            ))),
        }
    }

    /// The ranks that have the other stages.
    fn stages(self) -> World {
        self.runtime.world().part_ranks()
    }

    /// Sends the rows of a micro-batch to the next stage.
    pub fn send_rows(self, rows: Tensor<2>) -> Result<()> {
        self.send(self.stage.stage() + 1, rows)
    }

    /// Sends the gradient of a micro-batch's rows to the stage before.
    pub fn send_gradient(self, d_rows: Tensor<2>) -> Result<()> {
        self.send(self.stage.stage() - 1, d_rows)
    }

    /// The rows of a micro-batch from the stage before.
    pub fn receive_rows(self, micro: &MicroBatch) -> Result<Tensor<2>> {
        self.receive(self.stage.stage() - 1, micro)
    }

    /// The gradient of a micro-batch's rows from the next stage.
    pub fn receive_gradient(self, micro: &MicroBatch) -> Result<Tensor<2>> {
        self.receive(self.stage.stage() + 1, micro)
    }

    /// Tells the stage before that its rows have arrived: it may send the next ones.
    pub fn acknowledge(self) -> Result<()> {
        self.stages().send(self.stage.stage() - 1, Flat::Bytes(Vec::new()))
    }

    /// Waits until the next stage has the rows that were sent last.
    pub fn wait_for_acknowledgement(self) -> Result<()> {
        self.stages().receive(self.stage.stage() + 1, 0, Element::Byte).map(drop)
    }

    fn send(self, stage: usize, rows: Tensor<2>) -> Result<()> {
        let rows = HostTensor::download(rows)?;
        let accounts = &self.runtime.accounts;
        let _held = accounts.hold(Category::Communication, Home::Host, rows.bytes());
        self.stages().send(stage, Flat::as_stored(rows))
    }

    fn receive(self, stage: usize, micro: &MicroBatch) -> Result<Tensor<2>> {
        let [tokens] = micro.ids.dims();
        let element = match self.stored {
            DType::F64 => Element::F64,
            DType::BF16 => Element::Bf16,
            DType::F16 => Element::F16,
            _ => Element::F32,
        };
        let values = self.stages().receive(stage, tokens * self.hidden, element)?;
        let rows = values.into_host_tensor([tokens, self.hidden]);
        let accounts = &self.runtime.accounts;
        let _held = accounts.hold(Category::Communication, Home::Host, rows.bytes());
        Ok(stored_as(rows.into_device(self.runtime.device()), self.stored))
    }
}

impl Gradients {
    /// Adds up what the first and the last stage have of the gradient of a tied matrix: afterwards both have the same,
    /// to the bit. A stage that had no micro-batch contributes zeros.
    pub(super) fn sum_tied_ends(&mut self, decoder: &Decoder, runtime: &Runtime) -> Result<()> {
        let Some(stage) = decoder.stage() else {
            return Ok(());
        };
        let (arch, embedding) = (decoder.arch(), &decoder.units()[0]);
        if !arch.tied || decoder.is_on_other_stage(0) || !embedding.trains() {
            return Ok(());
        }
        self.finish()?;
        let other = if stage.is_first() { stage.stages() - 1 } else { 0 };
        let element = Element::of(gradient_dtype(decoder));
        for (spec, index) in embedding.specs.iter().zip(embedding.range.clone()) {
            if !spec.trainable {
                continue;
            }
            let gradient = match self.take_own(index) {
                Some(gradient) => Flat::from(gradient.into_host()?),
                None => Flat::zeros(element, spec.numel()),
            };
            let bytes = 2 * gradient.as_bytes().len();
            let held = self.accounts.hold(Category::Communication, Home::Host, bytes);
            let group = runtime.world().part_ranks();
            group.send(other, gradient.clone())?;
            let theirs = group.receive(other, gradient.len(), element)?;
            let [first, last] = if stage.is_first() { [gradient, theirs] } else { [theirs, gradient] };
            let mut sum = first.into_host_tensor(spec.rows_cols());
            sum.add(last.into_host_tensor(spec.rows_cols()));
            drop(held);
            self.put(index, Gradient::Host(sum), decoder.device());
        }
        Ok(())
    }
}
