//! One training micro-batch, moment by moment: forward, head, and backward through the segments from the last to the
//! first.
//!
//! While segment `s` goes backward there are: the inputs kept by it and the segments before it, the graphs of segments
//! before it that keep theirs, its own graph (of what lies below the sublayer at hand), gradients on their way, and the
//! parameters' gradients so far. From the second micro-batch on these are all parameters' and the segment's once more.
//!
//! A stage of a pipeline has its own segments alone, and what all of them keep of the other micro-batches that are
//! under way: of `P - s` in all on stage `s` of `P` (one forward, one backward). The embedding is on the first stage,
//! the head on the last.

use crate::estimate::{Activity, Context, F32, HeadCost, MemoryUsage, ModelState, Moment, PeakUsage, Sublayer};
use crate::{ActivationPolicy, ModelPlan, Order, Role, Segment};
use firebrick_arch::PipelineStage;
use firebrick_spec::{Backend, Category, Home};

/// Device bytes of a sublayer in a micro-batch.
#[derive(Clone, Copy, Default)]
struct SublayerBytes {
    /// Kept by its graph, without its input.
    kept: u64,
    /// Scores of attention among it.
    scores: u64,
    /// Buffers of its backward.
    backward: MemoryUsage,
}

/// A walk over the segments of a model that is trained.
pub(crate) struct BackwardPass<'a> {
    ctx: &'a Context<'a>,
    plan: &'a ModelPlan,
    /// In use throughout.
    base: MemoryUsage,
    /// Bytes of one d-wide activation of a micro-batch.
    row: u64,
    /// Micro-batches whose kept inputs live at the same time.
    copies: u64,
    /// Micro-batches under way: on a stage of a pipeline those that went forward and not backward.
    in_flight: u64,
    /// True if an earlier micro-batch left a gradient for every parameter.
    full: bool,
    /// Numbers that are trained.
    trained: u64,
    splits: bool,
    /// By kind.
    sublayers: [SublayerBytes; Sublayer::ALL.len()],
    /// Graphs that are kept by the segments before each, and by all.
    graphs: Vec<MemoryUsage>,
    /// Inputs that are kept by the segments before each, and by all: on the device, and on the host.
    inputs: Vec<[u64; 2]>,
}

impl<'a> BackwardPass<'a> {
    pub fn new(ctx: &'a Context<'a>) -> Self {
        let plan = ctx.model();
        let shape = ctx.train_shape();
        let micros = ctx.micro_batches();
        let copies = match plan.order {
            Order::MicroMajor => 1,
            Order::SegmentMajor => micros,
        };
        let in_flight = ctx.in_flight().min(micros);
        let mut pass = Self {
            plan,
            base: ctx.resident(Activity::Pass(ctx.role))
                + ctx.batch_buffers(shape, plan.attention_rows, copies.max(in_flight)),
            row: ctx.parallel.between(ctx.widths.row(shape.tokens)),
            copies,
            in_flight,
            // segment by segment, a parameter's gradients of all micro-batches meet in its own sum
            full: micros > copies,
            trained: ctx.sizes.trained(),
            splits: ctx.widths.splits(shape, plan.attention_rows),
            sublayers: [SublayerBytes::default(); Sublayer::ALL.len()],
            graphs: Vec::with_capacity(plan.segments.len() + 1),
            inputs: Vec::with_capacity(plan.segments.len() + 1),
            ctx,
        };
        for sublayer in ctx.sizes.kinds() {
            pass.sublayers[sublayer as usize] = pass.sublayer(sublayer);
        }
        pass.sum_segments();
        pass
    }

    fn sublayer(&self, sublayer: Sublayer) -> SublayerBytes {
        let (ctx, shape) = (self.ctx, self.ctx.train_shape());
        let (widths, parallel) = (&ctx.widths, ctx.parallel);
        let rows = self.plan.attention_rows;
        let extra = widths.bytes(widths.extra(sublayer, self.splits), shape.tokens, parallel)
            + widths.widened(sublayer, true, shape.tokens, parallel);
        // a part of a sum over devices ends a graph
        let part = if parallel.tensor > 1 { self.row } else { 0 };
        let mut bytes = SublayerBytes {
            kept: widths.bytes(widths.kept(sublayer), shape.tokens, parallel) + part,
            scores: 0,
            backward: MemoryUsage::default()
                .on_device(Category::LiveGraph, extra)
                .on_device(Category::Buffers, ctx.widening() + self.library_sum()),
        };
        if sublayer == Sublayer::Attention {
            let [kept, sent] = ctx.shared_attention(shape.tokens);
            bytes.kept += kept;
            bytes.scores = parallel.inside(F32 * widths.scores_kept(shape, rows));
            let scores = F32 * widths.scores_extra(shape, rows);
            bytes.backward = bytes
                .backward
                .on_device(Category::Attention, parallel.inside(scores))
                .on_device(Category::Buffers, sent);
        }
        if let (Sublayer::Linear, Some(linear)) = (sublayer, widths.linear()) {
            bytes.kept += parallel.inside(F32 * linear.kept_states(shape.tokens, shape.tree));
            let buffers = F32 * linear.scratch(shape.tokens, shape.tree);
            bytes.backward = bytes.backward.on_device(Category::Attention, parallel.inside(buffers));
        }
        bytes
    }

    /// The f32 sum of the products that the gradient of a sublayer's rows is, where cuBLASLt makes one after the other.
    fn library_sum(&self) -> u64 {
        let f32 = F32 / self.ctx.sizes.width;
        if self.ctx.workload.cublaslt { f32 * self.row } else { 0 }
    }

    /// Adds up once what segments keep: every moment looks at the sum of some of the first.
    fn sum_segments(&mut self) {
        let (mut graphs, mut inputs) = (MemoryUsage::default(), [0; 2]);
        for segment in &self.plan.segments {
            self.graphs.push(graphs);
            self.inputs.push(inputs);
            match segment.keep {
                ActivationPolicy::Graph => {
                    graphs += self.graph(segment, segment.units.end);
                    graphs = graphs.on_device(Category::LiveGraph, self.row);
                }
                ActivationPolicy::Input(Home::Device) => inputs[0] += 1,
                ActivationPolicy::Input(Home::Host) => inputs[1] += 1,
            }
        }
        self.graphs.push(graphs);
        self.inputs.push(inputs);
    }

    /// Sees every moment.
    pub fn run(mut self, peak: &mut PeakUsage) {
        let (base, micros) = (self.base, self.ctx.micro_batches());
        // the most that are under way, in a first backward pass if there are no more
        self.full = micros > self.copies.max(self.in_flight);
        self.base = base + self.kept_by_others(self.in_flight - 1);
        self.walk(peak);
        // and in the second one
        if self.in_flight > 1 && !self.full {
            self.full = true;
            self.base = base + self.kept_by_others(self.in_flight - 2);
            self.walk(peak);
        }
        self.base = base;
        self.tied_ends(peak);
        self.reduces_at_end(peak);
    }

    /// Kept activations of `others` other micro-batches.
    fn kept_by_others(&self, others: u64) -> MemoryUsage {
        let last = self.plan.segments.len();
        let [stay, offloaded] = self.inputs[last].map(|count| count * self.row * others);
        let kept =
            MemoryUsage::default().on_device(Category::KeptInputs, stay).on_host(Category::KeptInputs, offloaded);
        (0..others).fold(kept, |held, _| held + self.graphs[last])
    }

    /// The gradient of a tied matrix, of which the first stage and the last have a part: a message to the other, and
    /// one from there.
    fn tied_ends(&self, peak: &mut PeakUsage) {
        let two = |stage: PipelineStage| stage.is_first() || stage.is_last();
        if self.ctx.arch.tied && self.ctx.stage.is_some_and(two) {
            let sizes = &self.ctx.sizes;
            let bytes = F32 * sizes.trained_ends(sizes.embedding);
            let sum = self.with_gradients(self.base, self.trained, 0).on_host(Category::Communication, 2 * bytes);
            peak.record("the sum of a tied matrix's gradients", sum);
        }
    }

    /// Gradients that devices sum when all micro-batches are done, unit by unit in their order, and keep their shares
    /// of.
    fn reduces_at_end(&self, peak: &mut PeakUsage) {
        let ctx = self.ctx;
        if !ctx.parallel.reduces_at_end() {
            return;
        }
        let (mut left, mut summed, mut largest) = (self.trained, 0, 0);
        for unit in self.state().trained_units() {
            left -= unit;
            // later units that are no larger need less
            if unit > largest {
                largest = unit;
                let whole = ctx.parallel.replicated().gradients(F32 * left);
                let gradients = whole + ctx.parallel.optimizer(F32 * summed);
                let (base, home) = (self.base, self.plan.grads);
                let held = base.and(home, Category::Gradients, gradients);
                peak.record("the sum of a unit's gradients", held + self.summing(unit));
            }
            summed += unit;
        }
    }

    /// Buffers of summing `elements` gradients over devices.
    fn summing(&self, numbers: u64) -> MemoryUsage {
        self.ctx.parallel.summing(numbers, self.plan.grads)
    }

    /// Sees the moments of a micro-batch.
    fn walk(&self, peak: &mut PeakUsage) {
        let last = self.plan.segments.len();
        let moment = Moment { inputs: self.inputs[last], ..self.moment() };
        let before = self.with_gradients(self.graphs[last] + self.base, 0, 0);
        let forward = before + moment.held();
        let running = before + moment.visits(last, last - 1, self.plan.prefetch).held();
        let recomputes = self.plan.segments.iter().any(|s| s.keep != ActivationPolicy::Graph);
        let layer = recomputes.then(|| self.ctx.forward(self.ctx.train_shape(), self.plan.attention_rows));
        peak.record("the last segment's forward", running + layer.unwrap_or_default());
        let gathered = self.state().gathered_in_place();
        if gathered != MemoryUsage::default() {
            peak.record("gathering weights", forward + gathered);
        }
        if self.ctx.stage.is_some() {
            // through the host: a message that waits, one that is read, and what is read of it
            let rows =
                forward.on_device(Category::Buffers, 2 * self.row).on_host(Category::Communication, 3 * self.row);
            peak.record("rows on their way between stages", rows);
        }
        let sizes = &self.ctx.sizes;
        let on_the_way = self.ctx.parallel.reduces_each_pass();
        let mut done = 0;
        if self.ctx.has_head() {
            let visit = moment.visits(last + 1, last, self.plan.prefetch);
            peak.record("the head", self.head(before + visit.held()));
            if on_the_way {
                let sum = forward + self.summing(sizes.trained_ends(sizes.head));
                peak.record("the sum of the head's gradients", sum);
            }
            done = sizes.trained_ends(sizes.head);
            if self.ctx.arch.tied {
                done += sizes.trained_ends(sizes.embedding);
            }
        }
        for (index, segment) in self.plan.segments.iter().enumerate().rev() {
            self.segment(index, segment, done, peak);
            if !self.updates_in_backward() {
                done += self.numbers(segment);
            }
        }
        if !self.ctx.embeds() {
            return;
        }
        let trained = if self.updates_in_backward() { sizes.trained_ends(sizes.embedding) } else { self.trained };
        let rows = self.base.on_device(Category::Buffers, 2 * self.row * self.copies);
        let held = self.with_gradients(rows, trained, 0);
        peak.record("the embedding's gradient", held);
        if on_the_way {
            let sum = held + self.summing(sizes.trained_ends(sizes.embedding));
            peak.record("the sum of the embedding's gradients", sum);
        }
    }

    fn numbers(&self, segment: &Segment) -> u64 {
        segment.units.clone().map(|u| self.ctx.sizes.trained_unit(u)).sum()
    }

    /// The update in the backward pass leaves no gradients behind, if no earlier micro-batch did.
    fn updates_in_backward(&self) -> bool {
        self.plan.optimizer.in_backward && !self.full
    }

    /// Kept by the units of a segment before `end`, without its first input.
    fn graph(&self, segment: &Segment, end: usize) -> MemoryUsage {
        let (mut kept, mut scores) = (0, 0);
        for unit in segment.units.start..end {
            let sublayer = &self.sublayers[self.ctx.sizes.sublayer(unit) as usize];
            // the output of every sublayer but the last is the next one's input
            let inner = if unit + 1 < end { self.row } else { 0 };
            kept += sublayer.kept + inner;
            scores += sublayer.scores;
        }
        MemoryUsage::default().on_device(Category::LiveGraph, kept).on_device(Category::Attention, scores)
    }

    /// A moment at which nothing is kept and no weights visit.
    fn moment(&self) -> Moment<'_> {
        let scoring = Moment::of_scoring(self.ctx, self.plan, self.ctx.role.category());
        Moment { trains: true, row: self.row, copies: self.copies, ..scoring }
    }

    fn state(&self) -> ModelState<'_> {
        self.ctx.state(self.plan)
    }

    /// Adds the parameters' gradients: `done` numbers are complete for this micro-batch, `fresh` ones are the
    /// segment's.
    fn with_gradients(&self, held: MemoryUsage, done: u64, fresh: u64) -> MemoryUsage {
        let share = |numbers| self.ctx.parallel.gradients(F32 * numbers);
        // a segment's own are whole until they are summed
        let whole = |numbers| self.ctx.parallel.replicated().gradients(F32 * numbers);
        let complete = if self.full { self.trained } else { done };
        // a gradient adds itself to the sum in place: the segment's own are what is there besides, unless products add
        let fresh = if self.full && self.products_add() { 0 } else { fresh };
        held.on_device(Category::Gradients, whole(fresh)).and(self.plan.grads, Category::Gradients, share(complete))
    }

    /// True if products of a backward pass add gradients of matrices to their sums, which stay on the device. Vectors
    /// are too small to count.
    fn products_add(&self) -> bool {
        let (ctx, tensor_cores) = (self.ctx, self.ctx.profile.backend == Backend::Cuda);
        let halves = ctx.arch.precision.width() < F32;
        let stay = self.plan.grads == Home::Device && !ctx.parallel.reduces_each_pass();
        tensor_cores && halves && stay && ctx.arch.expert_layers().next().is_none()
    }

    fn head(&self, held: MemoryUsage) -> MemoryUsage {
        let ctx = self.ctx;
        let shape = ctx.head_shape(ctx.train_shape());
        let cost = HeadCost::new(ctx.arch, self.plan.head_rows, ctx.profile);
        let sizes = &ctx.sizes;
        let weights = sizes.width * sizes.projection;
        let weights = match (ctx.parallel.gathers(), self.plan.ends) {
            (true, _) if ctx.arch.tied => 0,
            (true, _) => ctx.parallel.replicated().weights(weights),
            (false, Home::Host) => ctx.parallel.weights(weights),
            (false, Home::Device) => 0,
        };
        let projection = sizes.trained_ends(sizes.projection);
        // a chunk's beside the sum, where it does not add it tile by tile
        let beside = if cost.in_tiles() && ctx.parallel.tensor == 1 { 0 } else { projection };
        let adds = cost.adds(shape, self.copies);
        let fresh = match (self.full, adds) {
            // the sum is among all parameters' already
            (true, _) => beside,
            (false, false) => projection,
            (false, true) => projection + beside,
        };
        let entropy = ctx.workload.entropy && ctx.role == Role::Policy;
        // ranks that share the vocabulary have no tiles to keep
        let recomputes = self.plan.recompute_logits || ctx.parallel.tensor > 1;
        let backward = ctx.parallel.tensor_share(cost.backward(shape, entropy, recomputes));
        let gradients = match self.plan.grads {
            Home::Device => fresh,
            // chunks are summed on the device before the sum leaves it
            Home::Host => projection + if adds { beside } else { 0 },
        };
        // what the matmul for the projection's gradient packs on the CPU
        let made = match projection {
            0 => 0,
            _ if ctx.profile.backend == Backend::Cpu => cost.packed(shape),
            _ => 0,
        };
        held.on_device(Category::Head, backward)
            .on_device(Category::Buffers, self.row * self.copies + 2 * cost.picked(shape))
            .on_device(ctx.role.category(), weights)
            .on_device(Category::Gradients, ctx.parallel.replicated().gradients(F32 * (gradients + made)))
    }

    fn segment(&self, index: usize, segment: &Segment, done: u64, peak: &mut PeakUsage) {
        let ctx = self.ctx;
        let visit = 2 * self.plan.segments.len() + 1 - index;
        let moment =
            Moment { inputs: self.inputs[index + 1], ..self.moment() }.visits(visit, index, self.plan.prefetch);
        let input = match segment.keep {
            ActivationPolicy::Graph | ActivationPolicy::Input(Home::Host) => self.row,
            ActivationPolicy::Input(Home::Device) => 0,
        };
        let below = self.base + self.graphs[index];
        let below = below
            .on_device(Category::LiveGraph, input)
            // the gradient that came in, for every micro-batch on its way
            .on_device(Category::Buffers, self.row * self.copies);
        let (mut fresh, mut added) = (0, 0);
        for unit in segment.units.clone().rev() {
            let sublayer = ctx.sizes.sublayer(unit);
            let trained = ctx.sizes.trained_unit(unit);
            let besides = self.sublayers[sublayer as usize].backward;
            // the largest matrix of a sublayer has about a third of it, and its matmul is made beside the others
            let now = fresh + trained / 3;
            let held = below + self.graph(segment, unit + 1) + besides + Moment { fresh: now, ..moment }.held();
            peak.record(
                match sublayer {
                    Sublayer::Attention => "an attention half's backward",
                    Sublayer::Linear => "a linear attention half's backward",
                    Sublayer::Mlp => "an MLP half's backward",
                    Sublayer::Experts => "the experts' backward",
                },
                self.with_gradients(held, done + added, now),
            );
            // attention that is computed again cuts the graph at every attention sublayer; elsewhere a segment is one
            // graph
            if self.splits && sublayer != Sublayer::Linear && !ctx.parallel.reduces_each_pass() {
                added += trained;
            } else {
                fresh += trained;
            }
        }
        let mut end = self.with_gradients(below + Moment { fresh, ..moment }.held(), done + added, fresh);
        if self.plan.optimizer.in_backward {
            end += self.state().update_buffers(&ctx.profile.kernels);
        }
        peak.record("a segment's complete gradient", end);
        if ctx.parallel.reduces_each_pass() {
            let unit = segment.units.clone().map(|unit| ctx.sizes.trained_unit(unit)).max().unwrap_or(0);
            // what is in the message is no longer where it was, and what the segment gathered is gone
            let fresh = fresh - unit;
            let held = Moment { fresh, ..moment }.held().off_device(moment.category, self.state().gathered_by(segment));
            let rest = self.with_gradients(below + held, done + added, fresh);
            peak.record("the sum of a unit's gradients", rest + self.summing(unit));
        }
    }
}
