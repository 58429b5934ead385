//! The shape of gated `DeltaNet` layers.

use super::fields::Fields;
use crate::Result;
use crate::arch::{GatedDeltaNet, Mixer};

/// Most layers of an architecture with several mixers: estimates keep a bit for each.
const MOST_LAYERS: usize = 256;

/// What a config says of these layers, where it has any. Absent keys have transformers' defaults.
pub(super) fn read(f: &Fields<'_>, mixers: &[Mixer]) -> Result<Option<GatedDeltaNet>> {
    if !mixers.contains(&Mixer::GatedDeltaNet) {
        return Ok(None);
    }
    if !mixers.contains(&Mixer::Attention) {
        return Err(f.error(
            "`layer_types` has no full_attention: models of linear attention alone are not supported".into(),
        ));
    }
    if mixers.len() > MOST_LAYERS {
        return Err(f.error(format!(
            "`num_hidden_layers` is {}; models with linear attention may have {MOST_LAYERS} layers",
            mixers.len()
        )));
    }
    let size = |key: &str, default: usize| Ok(f.size(key)?.unwrap_or(default));
    let own = GatedDeltaNet {
        num_key_heads: size("linear_num_key_heads", 16)?,
        num_value_heads: size("linear_num_value_heads", 32)?,
        key_head_dim: size("linear_key_head_dim", 128)?,
        value_head_dim: size("linear_value_head_dim", 128)?,
        conv_kernel_dim: size("linear_conv_kernel_dim", 4)?,
    };
    let (keys, values) = (own.num_key_heads, own.num_value_heads);
    if values % keys != 0 {
        return Err(f.error(format!(
            "`linear_num_value_heads` ({values}) must be a multiple of `linear_num_key_heads` ({keys})"
        )));
    }
    if own.conv_kernel_dim < 2 {
        return Err(f.error(format!(
            "`linear_conv_kernel_dim` must be at least 2, found {}",
            own.conv_kernel_dim
        )));
    }
    Ok(Some(own))
}
