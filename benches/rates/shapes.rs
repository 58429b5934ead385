//! The shapes that are measured: products and attention of Qwen2.5-0.5B and 1.5B, or little ones.

/// What shapes follow from.
pub struct Model {
    pub name: &'static str,
    pub hidden: usize,
    pub intermediate: usize,
    pub vocabulary: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

pub const MODELS: [Model; 2] = [
    Model { name: "0.5B", hidden: 896, intermediate: 4864, vocabulary: 151_936, heads: 14, kv_heads: 2, head_dim: 64 },
    Model {
        name: "1.5B",
        hidden: 1536,
        intermediate: 8960,
        vocabulary: 151_936,
        heads: 12,
        kv_heads: 2,
        head_dim: 128,
    },
];

pub const SMALL: [Model; 1] =
    [Model { name: "small", hidden: 96, intermediate: 256, vocabulary: 2048, heads: 6, kv_heads: 2, head_dim: 16 }];

/// The sizes of a run.
pub struct Sizes {
    pub models: &'static [Model],
    pub squares: &'static [usize],
    /// Rows of a product; the last of them in backward products too.
    pub rows: &'static [usize],
    pub head_rows: usize,
    /// Sequences of a decoding step: rows of a layer's joined matrices.
    pub decoded: &'static [usize],
    /// Tokens of a sequence, of which there are as many as make `tokens`.
    pub lengths: &'static [usize],
    pub tokens: usize,
    /// Batches of attention: sequences, and tokens of the shortest and of the longest.
    pub batches: &'static [[usize; 3]],
    /// Side of the square matrix that is copied.
    pub copied: usize,
}

pub const FULL: Sizes = Sizes {
    models: &MODELS,
    squares: &[2048, 4096, 8192],
    rows: &[128, 512, 2048, 16_384],
    head_rows: 2048,
    decoded: &[64, 128, 256, 512],
    lengths: &[512, 1024, 2048, 4096],
    tokens: 8192,
    batches: &[[16, 640, 640], [32, 512, 512], [8, 2048, 2048], [4, 4096, 4096], [24, 100, 1200]],
    copied: 8192,
};

pub const LITTLE: Sizes = Sizes {
    models: &SMALL,
    squares: &[128, 256],
    rows: &[64, 256],
    head_rows: 64,
    decoded: &[8],
    lengths: &[64, 128],
    tokens: 256,
    batches: &[[4, 48, 48], [5, 10, 60]],
    copied: 512,
};

/// Which product of a layer `y = x Wᵀ`.
#[derive(Clone, Copy)]
pub enum Pass {
    Forward,
    /// `dx = dy W`
    Inputs,
    /// `dW = dyᵀ x`
    Weights,
}

impl Pass {
    pub const ALL: [Self; 3] = [Self::Forward, Self::Inputs, Self::Weights];

    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Inputs => "inputs",
            Self::Weights => "weights",
        }
    }
}

/// One product: `[rows, inner]` by `[outputs, inner]`, and what is computed of it.
pub struct Product {
    pub name: String,
    pub rows: usize,
    pub inner: usize,
    pub outputs: usize,
    pub pass: Pass,
}

/// Lengths of a batch's sequences, evenly between the shortest and the longest.
pub fn lengths([sequences, shortest, longest]: [usize; 3]) -> Vec<usize> {
    let steps = (sequences - 1).max(1);
    (0..sequences).map(|i| shortest + (longest - shortest) * i / steps).collect()
}

/// The products of a decoding step's layers, whose matrices are joined, and of the head.
pub fn decoded(model: &Model, sizes: &Sizes) -> Vec<Product> {
    let (queries, keys) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let matrices = [
        ("qkv_proj", model.hidden, queries + 2 * keys),
        ("o_proj", queries, model.hidden),
        ("gate_up_proj", model.hidden, 2 * model.intermediate),
        ("down_proj", model.intermediate, model.hidden),
        ("lm_head", model.hidden, model.vocabulary),
    ];
    let of = |&rows: &usize| {
        matrices.map(|(name, inner, outputs)| Product {
            name: format!("{} decode {name}", model.name),
            rows,
            inner,
            outputs,
            pass: Pass::Forward,
        })
    };
    sizes.decoded.iter().flat_map(of).collect()
}

/// The products of a decoder's layers and head.
pub fn products(model: &Model, sizes: &Sizes) -> Vec<Product> {
    let (queries, keys) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let layers = [
        ("q_proj", model.hidden, queries),
        ("k_proj", model.hidden, keys),
        ("gate_proj", model.hidden, model.intermediate),
        ("down_proj", model.intermediate, model.hidden),
    ];
    let product = |name: &str, [rows, inner, outputs]: [usize; 3], pass| Product {
        name: format!("{} {name}", model.name),
        rows,
        inner,
        outputs,
        pass,
    };
    let mut all = Vec::new();
    for &rows in sizes.rows {
        let last = Some(&rows) == sizes.rows.last();
        let passes = if last { &Pass::ALL[..] } else { &Pass::ALL[..1] };
        for (name, inner, outputs) in layers {
            all.extend(passes.iter().map(|&pass| product(name, [rows, inner, outputs], pass)));
        }
    }
    let head = [sizes.head_rows, model.hidden, model.vocabulary];
    all.extend(Pass::ALL.map(|pass| product("lm_head", head, pass)));
    all
}
