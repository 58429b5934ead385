//! Search for the first NaN or infinite number of an optimizer step that was skipped.

use super::segment_executor::Executor;
use crate::learner::Learner;
use crate::{Gradients, HeadLoss};
use burn::tensor::Tensor;
use firebrick_backends::accounts::Home;
use firebrick_backends::transfer::HostTensor;
use firebrick_core::Result;
use firebrick_core::sequence::{SampleId, Sequence};
use firebrick_models::Decoder;
use firebrick_models::unit::UnitKind;
use firebrick_plan::{ActivationPolicy, ModelPlan, Segment};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// The first tensor with NaN or infinite values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The tensor, with its unit or its name, and the number of such values.
    pub tensor: String,
    /// The sample; `None` for a weight.
    pub sample: Option<SampleId>,
}

/// Keeps the first tensor of a pass that has NaN or infinite values.
#[derive(Debug, Default)]
pub(super) struct FiniteCheck(Mutex<Option<String>>);

impl FiniteCheck {
    /// Checks a tensor on the device.
    pub fn device(&self, tensor: Tensor<2>, name: impl FnOnce() -> String) -> Result<()> {
        self.host(&HostTensor::download(tensor)?, name);
        Ok(())
    }

    /// Checks a tensor on the host.
    pub fn host(&self, values: &HostTensor, name: impl FnOnce() -> String) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if found.is_none() {
            *found = described(values, name);
        }
    }

    /// Checks a number.
    pub fn number(&self, number: f64, name: &str) {
        let mut found = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !number.is_finite() {
            found.get_or_insert_with(|| format!("{name} is {number}"));
        }
    }

    fn into_found(self) -> Option<String> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tensor with NaN or infinite values.
fn described(values: &HostTensor, name: impl FnOnce() -> String) -> Option<String> {
    let values = values.to_f32();
    let count = values.iter().filter(|value| !value.is_finite()).count();
    (count > 0).then(|| format!("{}: {count} of {} values are NaN or infinite", name(), values.len()))
}

impl Executor<'_> {
    /// Checks rows of micro-batches, or their gradients, at a boundary of units, in a search.
    pub(super) fn check_rows(
        &self,
        decoder: &Decoder,
        rows: &[Tensor<2>],
        what: &str,
        units: &Range<usize>,
    ) -> Result<()> {
        let Some(check) = self.finite_check else { return Ok(()) };
        let name = || format!("{what} of {}", unit_name(decoder.units()[units.start].kind));
        rows.iter().try_for_each(|rows| check.device(rows.clone(), name))
    }
}

fn unit_name(kind: UnitKind) -> String {
    match kind {
        UnitKind::Embedding => "the embedding".to_owned(),
        UnitKind::Attention(layer) => format!("the attention block of layer {layer}"),
        UnitKind::Mlp(layer) => format!("the MLP block of layer {layer}"),
        UnitKind::Head => "the head".to_owned(),
    }
}

/// A plan with a segment per unit, which keeps its input.
fn unit_by_unit(plan: &ModelPlan) -> ModelPlan {
    let units = plan.segments.iter().flat_map(|segment| segment.units.clone().map(move |unit| (unit, segment)));
    let keep = ActivationPolicy::Input(Home::Device);
    let segments = units.map(|(unit, segment)| Segment { units: unit..unit + 1, keep, ..segment.clone() });
    ModelPlan { segments: segments.collect(), ..plan.clone() }
}

impl Learner {
    /// Repeats the passes of an optimizer step, a sequence and a unit at a time, until a tensor has NaN or infinite
    /// values. First it looks at the weights, then at activations, log-probs, the loss and gradients of each sequence.
    /// On several ranks it looks at this rank's weights only. It changes nothing.
    ///
    /// # Errors
    /// As [`accumulate`](Self::accumulate).
    pub fn find_non_finite<'l>(
        &self,
        sequences: &[Sequence],
        temperature: f64,
        loss: impl Into<HeadLoss<'l>>,
    ) -> Result<Option<NonFinite>> {
        let mut decoder = self.model.decoder.clone();
        for (spec, param) in decoder.params() {
            let name = || format!("weight {}", spec.name);
            if let Some(tensor) = described(&param.download()?, name) {
                return Ok(Some(NonFinite { tensor, sample: None }));
            }
        }
        if !self.runtime.world().is_solo() {
            return Ok(None);
        }
        let (plan, loss) = (unit_by_unit(&self.model.plan), loss.into());
        for sequence in sequences {
            let check = FiniteCheck::default();
            let executor = Executor::new(&plan, &self.runtime, temperature)
                .for_role(self.model.role())
                .with_dropout(self.dropout)
                .with_router_loss(self.router_aux_loss_coef, sequence.tokens.len())
                .with_loss_scale(self.optimizer.loss_scale())
                .with_finite_check(&check);
            let mut gradients = Gradients::planned(decoder.specs().count(), &plan, &self.runtime);
            let micros = [vec![sequence]];
            executor.backward(&mut decoder, &micros, loss, &mut gradients, None)?;
            for (index, spec) in decoder.specs().enumerate().collect::<Vec<_>>().into_iter().rev() {
                if let Some(gradient) = gradients.take(index) {
                    check.host(&gradient.into_host()?, || format!("gradient of {}", spec.name));
                }
            }
            if let Some(tensor) = check.into_found() {
                return Ok(Some(NonFinite { tensor, sample: Some(sequence.id) }));
            }
        }
        Ok(None)
    }
}
