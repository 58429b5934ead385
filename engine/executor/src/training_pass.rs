//! A pass of micro-batches through a model that is trained: forward over segments, the head, backward over segments.

use super::activation_offload::ActivationStack;
use super::boundary_log::{Boundary, BoundaryKind};
use super::fetch::Fetcher;
use super::gradients::{GradientHook, Gradients};
use super::head::{HeadLoss, HeadPass};
use super::segment::{self, Piece, run, take};
use super::segment_executor::Executor;
use crate::batch::MicroBatch;
use burn::tensor::Tensor;
use firebrick_backends::accounts::MemoryGuard;
use firebrick_backends::trace::span_on;
use firebrick_core::Result;
use firebrick_core::sequence::Sequence;
use firebrick_models::Decoder;
use firebrick_models::routing::RouterLoss;
use firebrick_objectives::{LossSums, ROUTER_AUX_LOSS, Reduction};
use firebrick_plan::ActivationPolicy;
use std::ops::Range;

/// A segment under its graph, and the bytes that it is accounted for.
type Traced = (Vec<Piece>, Option<MemoryGuard>);

/// One optimizer step's way through a model, for several micro-batches at once where the plan's order says so.
pub(super) struct Pass<'a, 'r> {
    executor: &'a Executor<'r>,
    pub micros: Vec<MicroBatch>,
    fetch: Fetcher<'r>,
    kept: ActivationStack<'r>,
    /// Graphs of segments that keep them, in the order in which they were traced.
    graphs: Vec<Traced>,
}

/// Called for every unit whose gradient is complete.
pub(super) type UnitHook<'d> = &'d mut dyn FnMut(&mut Decoder, &mut Gradients, usize) -> Result<()>;

impl Executor<'_> {
    /// Forward and backward of an optimizer step's micro-batches: adds to `gradients`, returns the sums of the loss.
    /// `after` is told of every unit whose gradient is complete.
    ///
    /// # Errors
    /// As [`Self::score`], and those of `after`.
    pub fn backward<'l>(
        &self,
        decoder: &mut Decoder,
        micros: &[Vec<&Sequence>],
        loss: impl Into<HeadLoss<'l>>,
        gradients: &mut Gradients,
        after: Option<&mut dyn GradientHook>,
    ) -> Result<LossSums> {
        self.check(decoder, self.router_loss.0)?;
        let loss = loss.into();
        self.runtime.pass(|| self.backward_in_groups(decoder, micros, loss, gradients, after))
    }

    fn backward_in_groups(
        &self,
        decoder: &mut Decoder,
        micros: &[Vec<&Sequence>],
        loss: HeadLoss<'_>,
        gradients: &mut Gradients,
        mut after: Option<&mut dyn GradientHook>,
    ) -> Result<LossSums> {
        if decoder.stage().is_some() {
            return self.backward_in_stages(decoder, micros, loss, gradients);
        }
        let mut sums = LossSums::default();
        // the coefficient is that of a step, however it is divided
        let (coefficient, tokens) = self.router_loss;
        let layers = decoder.arch().expert_layers().count();
        let balances = coefficient > 0.0 && layers > 0;
        let balanced = |micro: MicroBatch| {
            let router_loss = micro.router_loss(coefficient * self.loss_scale, tokens, layers);
            micro.with_router_loss(balances.then_some(router_loss))
        };
        let mut router_loss = 0.0;
        let groups: Vec<&[Vec<&Sequence>]> = self.groups(micros).collect();
        for (i, group) in groups.iter().enumerate() {
            let last = i + 1 == groups.len();
            let visits = self.training_visits(decoder);
            let micros = group.iter().map(|s| balanced(self.micro_with_dropout(decoder, s)));
            let mut pass = Pass::new(self, micros.collect(), visits);
            let losses: Vec<RouterLoss> = pass.router_losses();
            let rows = pass.embed(decoder)?;
            let hidden = pass.forward(decoder, rows)?;
            let rows = pass.head(decoder, hidden, loss, gradients, &mut sums)?;
            let mut done =
                |decoder: &mut Decoder, gradients: &mut Gradients, unit| match after.as_deref_mut().filter(|_| last) {
                    Some(after) => after.complete(decoder, gradients, unit),
                    None => Ok(()),
                };
            done(decoder, gradients, decoder.units().len() - 1)?;
            let rows = pass.backward(decoder, rows, gradients, &mut done)?;
            pass.embedding_backward(decoder, rows, gradients, &mut done)?;
            router_loss += losses.iter().map(RouterLoss::sum).sum::<f64>();
        }
        if balances {
            sums.metrics.push((ROUTER_AUX_LOSS, Reduction::Sum, router_loss));
        }
        for _ in groups.len()..self.rounds {
            self.idle_round(decoder, gradients)?;
        }
        gradients.finish()?;
        Ok(sums)
    }
}

impl<'a, 'r> Pass<'a, 'r> {
    /// A pass of some micro-batches that visits units in this order.
    pub fn new(executor: &'a Executor<'r>, micros: Vec<MicroBatch>, visits: Vec<Range<usize>>) -> Self {
        let Executor { plan, runtime, role, .. } = *executor;
        Self {
            executor,
            micros,
            fetch: executor.fetcher(visits),
            kept: ActivationStack::new(runtime, role, plan.prefetch, plan.offload_group),
            graphs: Vec::new(),
        }
    }

    /// Visits the units that are left from here on in another order.
    pub fn visit(&mut self, visits: Vec<Range<usize>>) {
        self.fetch = self.executor.fetcher(visits);
    }

    /// The auxiliary losses of its micro-batches, which layers add to as their graphs are traced.
    pub fn router_losses(&self) -> Vec<RouterLoss> {
        self.micros.iter().filter_map(|micro| micro.ctx.router_loss()).cloned().collect()
    }

    /// The rows of every micro-batch before the first layer.
    pub fn embed(&mut self, decoder: &Decoder) -> Result<Vec<Tensor<2>>> {
        let rows = self.executor.embed(decoder, &self.fetch.next(decoder)?, &self.micros)?;
        self.executor.check_rows(decoder, &rows, "output", &(0..1))?;
        Ok(rows)
    }

    /// The rows of every micro-batch behind the last segment, given those before the first.
    pub fn forward(&mut self, decoder: &Decoder, mut rows: Vec<Tensor<2>>) -> Result<Vec<Tensor<2>>> {
        let _span = span_on("segments forward", decoder.device());
        for (i, segment) in self.executor.plan.segments.iter().enumerate() {
            let fetched = self.fetch.next(decoder)?;
            for (x, micro) in rows.iter_mut().zip(&self.micros) {
                let (at, units) = (self.executor.at(decoder, micro), segment.units.clone());
                match segment.keep {
                    ActivationPolicy::Graph => {
                        let before = at.runtime.in_use();
                        let (pieces, y) = segment::trace(at, units, &fetched.weights, take(x))?;
                        self.graphs.push((pieces, self.executor.hold_graph(before)));
                        *x = y;
                    }
                    ActivationPolicy::Input(home) => {
                        self.kept.push(x.clone(), home)?;
                        run(at, units, &fetched.weights, x)?;
                    }
                }
                at.runtime.boundary(Boundary::at(BoundaryKind::Forward, i))?;
            }
            self.executor.check_rows(decoder, &rows, "output", &segment.units)?;
        }
        Ok(rows)
    }

    /// Head and loss of every micro-batch: the gradients of their last layer's rows.
    pub fn head(
        &mut self,
        decoder: &Decoder,
        hidden: Vec<Tensor<2>>,
        loss: HeadLoss<'_>,
        gradients: &mut Gradients,
        sums: &mut LossSums,
    ) -> Result<Vec<Tensor<2>>> {
        let _span = span_on("head", decoder.device());
        let runtime = self.executor.runtime;
        let fetched = self.fetch.next(decoder)?;
        let pass = HeadPass {
            weights: &fetched.weights[0],
            rows: self.executor.plan.head_rows,
            temperature: self.executor.temperature,
            recomputes: self.executor.plan.recompute_logits,
            loss_scale: self.executor.loss_scale,
            finite_check: self.executor.finite_check,
        };
        let mut rows = Vec::with_capacity(hidden.len());
        for (hidden, micro) in hidden.into_iter().zip(&self.micros) {
            let (d_scored, head_sums) = pass.backward(self.executor.at(decoder, micro), hidden, loss, gradients)?;
            if let Some(check) = self.executor.finite_check {
                check.number(head_sums.loss, "the loss");
                check.device(d_scored.clone(), || "gradient of the head's input".to_owned())?;
            }
            sums.absorb(&head_sums);
            // unscored rows read the row of zeros that stands behind the scored ones: a gather, not a scatter
            let zero = Tensor::<2>::zeros([1, d_scored.dims()[1]], (&d_scored.device(), d_scored.dtype()));
            rows.push(Tensor::cat(vec![d_scored, zero], 0).select(0, micro.places.clone()));
            runtime.boundary(BoundaryKind::Head)?;
        }
        let head = decoder.units()[decoder.units().len() - 1].range.clone();
        gradients.complete(decoder, head, runtime)?;
        if decoder.arch().tied {
            gradients.complete(decoder, decoder.units()[0].range.clone(), runtime)?;
        }
        Ok(rows)
    }

    /// The gradients of the rows before the first segment, given those of the rows behind the last.
    pub fn backward(
        &mut self,
        decoder: &mut Decoder,
        mut rows: Vec<Tensor<2>>,
        gradients: &mut Gradients,
        done: UnitHook<'_>,
    ) -> Result<Vec<Tensor<2>>> {
        let Executor { plan, runtime, .. } = *self.executor;
        let device = decoder.device().clone();
        for (i, segment) in plan.segments.iter().enumerate().rev() {
            let _span = span_on("segments backward", &device);
            self.kept.start_copies();
            let fetched = self.fetch.next(decoder)?;
            for (d, micro) in rows.iter_mut().zip(&self.micros).rev() {
                let before = runtime.in_use();
                let at = self.executor.at(decoder, micro);
                let (pieces, hold) = match segment.keep {
                    ActivationPolicy::Graph => self.graphs.pop().unwrap_or_default(),
                    ActivationPolicy::Input(home) => {
                        let _span = span_on("recompute", decoder.device());
                        let input = self.kept.pop(home)?;
                        let (pieces, _) = segment::trace(at, segment.units.clone(), &fetched.weights, input)?;
                        (pieces, self.executor.hold_graph(before))
                    }
                };
                runtime.boundary(Boundary::at(BoundaryKind::Graph, i))?;
                *d = segment::backward(at, pieces, take(d), gradients)?;
                drop(hold);
                runtime.boundary(Boundary::at(BoundaryKind::Backward, i))?;
            }
            drop(fetched);
            self.executor.check_rows(decoder, &rows, "gradient of the input", &segment.units)?;
            for unit in segment.units.clone().rev() {
                gradients.complete(decoder, decoder.units()[unit].range.clone(), runtime)?;
                done(decoder, gradients, unit)?;
            }
        }
        Ok(rows)
    }

    /// Adds the gradients of the rows before the first layer to that of the embedding.
    pub fn embedding_backward(
        self,
        decoder: &mut Decoder,
        rows: Vec<Tensor<2>>,
        gradients: &mut Gradients,
        done: UnitHook<'_>,
    ) -> Result<()> {
        let runtime = self.executor.runtime;
        if !decoder.units()[0].trains() {
            return done(decoder, gradients, 0);
        }
        let device = decoder.device().clone();
        let _span = span_on("embedding gradient", &device);
        for (d, micro) in rows.into_iter().zip(&self.micros) {
            let at = self.executor.at(decoder, micro);
            let scale = decoder.arch().embedding_scale;
            let d = if let Some(scale) = scale { d * scale } else { d };
            at.sharding.embedding_gradient(at, d, gradients)?;
        }
        gradients.complete(decoder, decoder.units()[0].range.clone(), runtime)?;
        runtime.boundary(BoundaryKind::Embedding)?;
        done(decoder, gradients, 0)
    }
}
