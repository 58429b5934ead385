//! Matrices that bitsandbytes has quantised to 4 bits, as transformers saves them: the codes under the weight's name,
//! and beside them `.absmax`, `.quant_map`, `.nested_absmax`, `.nested_quant_map` and `.quant_state.bitsandbytes__nf4`,
//! a JSON text.
//!
//! Supported is the layout of [`BaseFormat::Nf4`]: nf4 in blocks of 64, with scales quantised in groups of 256.
//! Everything else is refused with the reason.

use firebrick_backends::quantized::{NF4, Nf4Parts, nf4_from_parts};
use firebrick_backends::transfer::HostTensor;
use firebrick_spec::BaseFormat;
use firebrick_spec::quantized::{NF4_BLOCK, NF4_GROUP};
use safetensors::tensor::Dtype;
use serde::Deserialize;

/// Suffixes of a weight's name in its quantization tensors.
const QUANTIZATION_SUFFIXES: [&str; 6] =
    [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATES[0], STATES[1]];

/// Suffixes of a module's name in the tensors of an 8-bit weight.
const MODULE_SUFFIXES: [&str; 2] = [".SCB", ".weight_format"];

/// Suffixes of the tensor that describes how a matrix is quantized.
const STATES: [&str; 2] = [".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"];

/// Refusal of bitsandbytes' matrices outside dense layers.
pub(super) const NOT_READ: &str = "is quantized by bitsandbytes, which is supported only for matrices of dense layers; \
                                   use the checkpoint that it was made from, which is quantized when it is loaded";

/// Remedy for a checkpoint that bitsandbytes has quantised.
pub(super) const NEEDS_BASE: &str = "is quantized to 4 bits by bitsandbytes; set model.lora.base to nf4 to train \
                                     adapters on it (--base nf4 if a command has no configuration), or use the \
                                     checkpoint that it was made from";

/// A tensor as a file has it.
pub(super) struct RawTensor<'a> {
    pub dtype: Dtype,
    pub shape: &'a [usize],
    pub bytes: &'a [u8],
}

/// Quantization of a matrix.
#[derive(Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

/// The weight that a tensor stands beside; `None` for a tensor by itself.
pub(super) fn weight_beside(name: &str) -> Option<String> {
    // 8-bit weights have theirs beside the module
    let of_module = MODULE_SUFFIXES.iter().find_map(|part| name.strip_suffix(part));
    let of_weight = QUANTIZATION_SUFFIXES.iter().find_map(|part| name.strip_suffix(part));
    of_module.map(|module| format!("{module}.weight")).or_else(|| of_weight.map(str::to_owned))
}

/// True if a weight is quantised, in a folder that has tensors of some names.
pub(super) fn is_quantised(weight: &str, has: impl Fn(&str) -> bool) -> bool {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    STATES.iter().any(|state| has(&format!("{weight}{state}"))) || has(&format!("{module}.SCB"))
}

/// The element type that a quantised matrix had, by the name that torch gives it.
pub(super) fn original_dtype<'a>(weight: &str, tensor: impl Fn(&str) -> Option<RawTensor<'a>>) -> Option<String> {
    let state = STATES.iter().find_map(|state| tensor(&format!("{weight}{state}")))?;
    let state: QuantState = serde_json::from_slice(state.bytes).ok()?;
    Some(state.dtype)
}

/// The buffer of a quantised matrix of a shape, with bitsandbytes' own codes and scales.
///
/// # Errors
/// The format that is not supported.
pub(super) fn read<'a>(
    weight: &str,
    shape: [usize; 2],
    tensor: impl Fn(&str) -> Option<RawTensor<'a>>,
) -> Result<HostTensor, String> {
    let part = |suffix: &str| {
        tensor(&format!("{weight}{suffix}"))
            .ok_or_else(|| format!("has no {weight}{suffix} next to it; download or copy it again"))
    };
    if tensor(&format!("{weight}{}", STATES[1])).is_some() {
        return Err(format!("is in fp4; {READ}"));
    }
    if tensor(&format!("{weight}{}", STATES[0])).is_none() {
        return Err(format!("is in 8 bits; {READ}"));
    }
    let state: QuantState =
        serde_json::from_slice(part(STATES[0])?.bytes).map_err(|e| format!("has an invalid {}: {e}", STATES[0]))?;
    check(&state, shape)?;
    let (codes, scales) = (bytes(&part("")?, "")?, bytes(&part(".absmax")?, ".absmax")?);
    let numbers = |suffix: &str| floats(&part(suffix)?, suffix);
    let code_map = numbers(".quant_map")?;
    if code_map != NF4 {
        return Err(format!("has a .quant_map that is not nf4's; {READ}"));
    }
    let parts = Nf4Parts {
        codes,
        scales,
        groups: &numbers(".nested_absmax")?,
        offset: state.nested_offset.unwrap_or_default() as f32,
        scale_map: &numbers(".nested_quant_map")?,
        code_map: &code_map,
    };
    nf4_from_parts(shape, parts).map_err(|e| format!("does not fit its shape: {e}"))
}

/// The supported formats.
const READ: &str = "of bitsandbytes' formats only nf4 in blocks of 64 with double quantization is supported \
                    (bnb_4bit_quant_type: nf4, bnb_4bit_use_double_quant: true); use the checkpoint that this one was \
                    made from, which is quantized when it is loaded";

fn check(state: &QuantState, shape: [usize; 2]) -> Result<(), String> {
    if state.quant_type != BaseFormat::Nf4.name() {
        return Err(format!("is in {}; {READ}", state.quant_type));
    }
    if state.blocksize != NF4_BLOCK {
        return Err(format!("has blocks of {}; {READ}", state.blocksize));
    }
    match (state.nested_blocksize, state.nested_dtype.as_deref()) {
        (Some(NF4_GROUP), Some("float32")) if state.nested_offset.is_some() => {}
        (None, _) => return Err(format!("has scales that are not quantized; {READ}")),
        (Some(group), kind) => {
            let kind = kind.unwrap_or("no type");
            return Err(format!("has scales in groups of {group} of type {kind}; {READ}"));
        }
    }
    if state.shape != shape {
        return Err(format!("has shape {:?}, expected {shape:?}", state.shape));
    }
    Ok(())
}

fn bytes<'a>(tensor: &RawTensor<'a>, suffix: &str) -> Result<&'a [u8], String> {
    match tensor.dtype {
        Dtype::U8 => Ok(tensor.bytes),
        other => {
            Err(format!("has codes{suffix} of type {other:?}, expected U8 (bnb_4bit_quant_storage: uint8); {READ}"))
        }
    }
}

fn floats(tensor: &RawTensor<'_>, suffix: &str) -> Result<Vec<f32>, String> {
    if tensor.dtype != Dtype::F32 || tensor.shape.len() != 1 {
        return Err(format!(
            "has {suffix} of type {:?} and shape {:?}, expected a vector of F32; {READ}",
            tensor.dtype, tensor.shape
        ));
    }
    Ok(tensor.bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}
