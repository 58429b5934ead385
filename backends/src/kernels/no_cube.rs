//! What stands for [`super::cube`] in builds without a GPU: no tensor is its own.

#![allow(
    clippy::needless_pass_by_value,
    clippy::unnecessary_wraps,
    reason = "the functions that stand here in builds with a GPU"
)]

use super::choice::Operation;
use burn::tensor::Device;

pub(super) fn largest_buffer(_: &Device) -> Option<u64> {
    None
}

pub(super) fn available(_: Operation, _: &Device) -> bool {
    false
}

pub(super) mod norm {
    use burn::tensor::Tensor;

    pub fn rms_norm(_: &Tensor<2>, _: &Tensor<2>, _: f64, _: f64) -> Option<Tensor<2>> {
        None
    }

    pub fn rms_norm_onto(
        base: Tensor<2>,
        _: &Tensor<2>,
        _: &Tensor<2>,
        _: f64,
        _: f64,
    ) -> Result<Tensor<2>, Tensor<2>> {
        Err(base)
    }
}

pub(super) mod glu {
    use crate::kernels::shapes::Gate;
    use burn::tensor::Tensor;

    pub fn glu(_: Gate, _: &Tensor<2>, _: &Tensor<2>) -> Option<Tensor<2>> {
        None
    }
}

pub(super) mod rotary {
    use burn::tensor::Tensor;

    pub fn rotary(x: Tensor<3>, _: &Tensor<3>, _: &Tensor<3>) -> Result<Tensor<3>, Tensor<3>> {
        Err(x)
    }
}

pub(super) mod scores {
    use crate::kernels::shapes::{RowScores, RunningScores, Scaling, ScoreGradients};
    use burn::tensor::{Int, Tensor};

    pub fn score_tile(
        _: &Tensor<2>,
        _: usize,
        _: &Tensor<1, Int>,
        _: Option<RunningScores>,
        _: Scaling,
    ) -> Option<RunningScores> {
        None
    }

    pub fn finish(running: RunningScores) -> RowScores {
        unreachable!("nothing makes {:?} in this build", running.0)
    }

    pub fn tile_gradient(
        _: Tensor<2>,
        _: usize,
        _: &Tensor<1, Int>,
        _: &RowScores,
        _: ScoreGradients<'_>,
        _: Scaling,
    ) -> Option<Tensor<2>> {
        None
    }
}

pub(super) mod panels {
    use burn::tensor::Tensor;

    /// There is none.
    #[derive(Clone, Debug)]
    pub enum Codes {}

    impl Codes {
        pub fn quantise(_: &Tensor<2>) -> Option<Self> {
            None
        }

        pub fn bytes(&self) -> usize {
            match *self {}
        }

        pub fn linear(&self, _: &Tensor<2>) -> Option<Tensor<2>> {
            match *self {}
        }

        pub fn linear_onto(&self, _: Tensor<2>, _: &Tensor<2>) -> Result<Tensor<2>, Tensor<2>> {
            match *self {}
        }

        pub fn linear_gated(gate: &Self, _: &Self, _: &Tensor<2>) -> Option<Tensor<2>> {
            match *gate {}
        }
    }
}

pub(super) mod adamw {
    use crate::kernels::shapes::{AdamWStep, Updated};
    use burn::tensor::Tensor;
    use std::ops::Range;

    pub fn updates(_: &Tensor<2>) -> bool {
        false
    }

    pub fn adamw(
        value: Tensor<2>,
        _: Range<usize>,
        _: &Tensor<2>,
        _: Option<[Tensor<2>; 2]>,
        _: Option<Tensor<2>>,
        _: &AdamWStep,
    ) -> Updated {
        unreachable!("nobody was told that a kernel updates {value:?}")
    }
}

pub(super) mod block8 {
    use crate::kernels::shapes::{Blocks8, Map8};
    use burn::tensor::{DType, Tensor};

    pub fn quantise(_: &Tensor<2>, _: &Map8<'_>) -> Option<Blocks8> {
        None
    }

    pub fn dequantise(_: &Blocks8, _: &Tensor<1>, _: [usize; 2], _: DType) -> Option<Tensor<2>> {
        None
    }
}

pub(super) mod embedding {
    use crate::kernels::shapes::Segments;
    use burn::tensor::Tensor;

    pub fn add_rows(
        sum: Tensor<2>,
        segments: &Segments,
        _: &Tensor<2>,
    ) -> Result<Tensor<2>, Tensor<2>> {
        let Segments {
            order,
            starts,
            ids,
            count,
        } = segments;
        unreachable!("nobody sorted {count} tokens: {order:?}, {starts:?}, {ids:?}, {sum:?}")
    }
}

pub(super) mod draw {
    use crate::kernels::shapes::Choice;
    use burn::tensor::Tensor;

    pub fn choose_rows(_: &Tensor<2>, _: Choice<'_>) -> Option<Tensor<2>> {
        None
    }
}

pub(super) mod decode {
    use crate::kernels::shapes::{DecodeShape, Live};
    use burn::tensor::Tensor;

    pub fn decode_attention(
        _: [Tensor<2>; 3],
        _: [Tensor<4>; 2],
        shape: &DecodeShape<'_>,
    ) -> Option<(Tensor<2>, [Tensor<4>; 2])> {
        if let Some(Live {
            table,
            rows,
            longest,
        }) = &shape.decoded.live
        {
            unreachable!("there is no GPU for {rows} rows of up to {longest} columns: {table:?}");
        }
        None
    }
}

pub(super) mod attention {
    use crate::kernels::families::Blocks;
    use crate::kernels::shapes::AttentionShape;
    use burn::tensor::Tensor;

    pub fn attention(
        _: &Tensor<3>,
        _: &Tensor<3>,
        _: &Tensor<3>,
        shape: &AttentionShape,
    ) -> Option<Tensor<3>> {
        if let Some(Blocks { table, count, rows }) = &shape.families.blocks {
            unreachable!("there is no GPU for {count} blocks of {rows} rows: {table:?}");
        }
        None
    }
}
