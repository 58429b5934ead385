//! Hugging Face checkpoint folders: reading their configs, and loading and writing weights and adapters.

mod bitsandbytes;
mod export;
mod ignored;
pub(crate) mod json;
mod mxfp4;
mod peft;
pub mod stream;
mod tensor_names;
mod weights;
mod whole_model;

pub use export::{ExportOptions, export};
pub use peft::{adapter_shape, is_adapter, load_adapter, save_adapter};
pub use weights::StoredDtype;
pub use whole_model::WholeModel;

use crate::arch::HeadKind;
use crate::decoder::RankShard;
use crate::{Arch, BaseFormat, Decoder, Error, Result};
use burn::tensor::Device;
use firebrick_backends::Precision;
use json::read_object;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Key of a config that ties the head to the embedding.
const TIED: &str = "tie_word_embeddings";

/// Writes into a config that it is not; also into that of the language model inside of it.
fn untie(config: &mut Map<String, Value>) {
    config.insert(TIED.to_owned(), json!(false));
    if let Some(Value::Object(inner)) = config.get_mut("text_config") {
        inner.insert(TIED.to_owned(), json!(false));
    }
}

/// The configs of a checkpoint folder and the element types of its tensors, without its weights: enough to write the
/// same model again.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: Map<String, Value>,
    /// The config of the model around the language model, where that is exported with it.
    outer_config: Option<Map<String, Value>>,
    generation: Option<Map<String, Value>>,
    arch: Arch,
    dtypes: BTreeMap<String, StoredDtype>,
}

impl Checkpoint {
    /// Reads the configs of a checkpoint folder and the headers of its weight files. Of a model that sees images this
    /// is the language model, as if it stood there by itself.
    ///
    /// # Errors
    /// As [`Self::describe`]; `Error::MissingFile` for a folder without safetensors, `Error::Io`, `Error::Safetensors`
    /// and `Error::Truncated` for a broken file, `Error::UnsupportedDtype`.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut described = Self::describe(dir)?;
        described.dtypes = weights::dtypes(dir, &described.arch)?;
        Ok(described)
    }

    /// Reads the configs of a checkpoint folder whose weights may not be there yet: all that a plan of its training
    /// needs. It is written again as f32.
    ///
    /// # Errors
    /// As [`Self::architecture`]; `Error::Io` and `Error::Config` for a `generation_config.json` that cannot be read.
    pub fn describe(dir: &Path) -> Result<Self> {
        let (config, arch) = Self::config(dir)?;
        let mut outer_config = read_object(dir, "config.json")?.filter(Arch::keeps_outer_model);
        if let Some(outer_config) = outer_config.as_mut().filter(|_| config.get(TIED) == Some(&json!(false))) {
            untie(outer_config);
        }
        let generation = read_object(dir, "generation_config.json")?;
        Ok(Self { dir: dir.to_owned(), config, outer_config, generation, arch, dtypes: BTreeMap::new() })
    }

    /// The architecture in a folder's `config.json`. Of a head that the config ties to the embedding it is looked up
    /// whether the weights, if they are there, have another one.
    ///
    /// # Errors
    /// `Error::NoFolder`, `Error::MissingFile` without a `config.json`, `Error::Io` and `Error::Config` where it cannot
    /// be read, and `Error::Architecture` where it describes no supported decoder.
    pub fn architecture(dir: &Path) -> Result<Arch> {
        Self::config(dir).map(|(_, arch)| arch)
    }

    fn config(dir: &Path) -> Result<(Map<String, Value>, Arch)> {
        if !dir.is_dir() {
            return Err(Error::NoFolder { dir: dir.to_owned() });
        }
        let config = read_object(dir, "config.json")?.ok_or_else(|| Error::MissingFile {
            dir: dir.to_owned(),
            file: "config.json".into(),
            hint: if is_adapter(dir) {
                "it is a PEFT adapter: pass its base model here, and this folder as the adapter"
            } else {
                "is it a Hugging Face checkpoint folder?"
            }
            .into(),
        })?;
        let mut config = Arch::language_model_config(&config).unwrap_or(config);
        // what is written again is not quantised
        let widened = |config: &Value| {
            let method = config.get("quant_method").and_then(Value::as_str);
            matches!(method, Some("bitsandbytes" | "mxfp4"))
        };
        if config.get("quantization_config").is_some_and(widened) {
            config.remove("quantization_config");
        }
        let mut arch = Arch::from_config(&config, &dir.join("config.json"))?;
        if ignored::has_own_head(dir, &arch) {
            ignored::report_once(dir, || {
                tracing::warn!(
                    "{}: config.json ties the head to the embedding, but the files have another lm_head.weight, which is \
                 used, as in transformers 5; the model is written with tie_word_embeddings: false",
                    dir.display()
                );
            });
            arch.tied = false;
            untie(&mut config);
        }
        Ok((config, arch))
    }

    /// A new model, from a config with transformers' key names; `eos` and `pad` are token ids.
    ///
    /// # Errors
    /// `Error::Architecture` where the config describes no supported decoder.
    pub fn create(mut config: Map<String, Value>, eos: Option<u32>, pad: Option<u32>) -> Result<Self> {
        Arch::complete_config(&mut config);
        let arch = Arch::from_config(&config, Path::new("model.arch"))?;
        let mut generation = Map::new();
        for (key, id) in [("eos_token_id", eos), ("pad_token_id", pad)] {
            if let Some(id) = id {
                config.insert(key.into(), json!(id));
                generation.insert(key.into(), json!(id));
            }
        }
        Ok(Self {
            dir: PathBuf::new(),
            config,
            outer_config: None,
            generation: Some(generation),
            arch,
            dtypes: BTreeMap::new(),
        })
    }

    /// Loads the weights onto a device, in the architecture's precision. Missing, unexpected and misshapen tensors are
    /// errors.
    ///
    /// Matrices of a frozen quantized base are quantised as they are read: beside what is loaded, one of them is wide
    /// at a time, in host memory. Matrices in MXFP4 are widened as they are read, one at a time too.
    ///
    /// # Errors
    /// `Error::MissingTensor`, `Error::UnexpectedTensor`, `Error::WrongShape`, `Error::UnsupportedDtype` and
    /// `Error::QuantizedWeight` with the tensor; `Error::Config` for a quantized base that the architecture cannot
    /// have; those of [`Self::open`] for files.
    pub fn load(&self, device: &Device) -> Result<Decoder> {
        self.load_shard(RankShard::default(), device)
    }

    /// A rank's part of the decoder, to be trained: of every parameter, or of every unit, that keeps its part before it
    /// reads the next.
    ///
    /// # Errors
    /// Those of [`load`](Self::load), and `Error::Shared` for a model that the ranks cannot share.
    pub fn load_shard(&self, part: RankShard<'_>, device: &Device) -> Result<Decoder> {
        weights::load(&self.dir, &self.arch, part, None, device)
    }

    /// A rank's part of a value model with the body of this language model and a new scalar head:
    /// [`Decoder::with_value_head`] of what [`load`](Self::load) gives. A model with a scalar head keeps it.
    ///
    /// # Errors
    /// Those of [`load_shard`](Self::load_shard).
    pub fn load_with_value_head(&self, part: RankShard<'_>, seed: u64, device: &Device) -> Result<Decoder> {
        weights::load(&self.dir, &self.arch, part, Some(seed), device)
    }

    /// The architecture.
    pub fn arch(&self) -> &Arch {
        &self.arch
    }

    /// The folder it was read from; empty for a new model.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Element type in which a tensor is stored: that of the folder read, F32 for a new model.
    pub fn stored_dtype(&self, tensor: &str) -> StoredDtype {
        self.dtypes.get(tensor).copied().unwrap_or(StoredDtype::F32)
    }

    /// This model, to be run in `precision` whatever its files store.
    #[must_use]
    pub fn in_precision(mut self, precision: Precision) -> Self {
        self.arch = self.arch.in_precision(precision);
        self
    }

    /// This model, to be loaded with its layers' matrices as a frozen quantized base, or as they are. A checkpoint that
    /// bitsandbytes has quantised to nf4 is read with that base alone.
    #[must_use]
    pub fn with_base(mut self, base: Option<BaseFormat>) -> Self {
        self.arch = self.arch.with_base(base);
        self
    }

    /// This model, to be stored in f32.
    #[must_use]
    pub fn stored_as_f32(mut self) -> Self {
        self.dtypes.clear();
        self
    }

    /// A critic with the body of this model and a scalar head, stored in f32 as transformers'
    /// `…ForSequenceClassification` with one label. A model that has such a head keeps it.
    #[must_use]
    pub fn with_value_head(mut self) -> Self {
        self.dtypes.clear();
        self.outer_config = None;
        if self.arch.head == HeadKind::LanguageModel {
            let class = self.arch.family.scorer_class();
            self.config.insert("architectures".into(), json!([class]));
            self.config.insert("num_labels".into(), json!(1));
            self.config.insert("id2label".into(), json!({"0": "LABEL_0"}));
            self.config.insert("label2id".into(), json!({"LABEL_0": 0}));
            self.generation = None;
            self.arch = self.arch.with_value_head();
        }
        self
    }

    /// The padding token's id, if the config names one: a sequence's score is that of the last token before padding.
    pub fn pad_id(&self) -> Option<u32> {
        let id = self.config.get("pad_token_id").and_then(Value::as_u64)?;
        u32::try_from(id).ok()
    }

    /// This model, written with these token ids that end a completion, in `generation_config.json`. A model without
    /// that file gets one, with the other special tokens of its config.
    #[must_use]
    pub fn with_eos_ids(mut self, ids: &[u32]) -> Self {
        let generation = self.generation.get_or_insert_with(|| {
            let kept = ["bos_token_id", "pad_token_id"].into_iter();
            kept.filter_map(|key| Some((key.to_owned(), self.config.get(key)?.clone()))).collect()
        });
        generation.insert("eos_token_id".into(), json!(ids));
        self
    }

    /// Token ids that end a completion: `generation_config.json`'s (a number or a list), else the config's.
    pub fn eos_ids(&self) -> Vec<u32> {
        let ids = |map: &Map<String, Value>| match map.get("eos_token_id") {
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_u64).map(|v| v as u32).collect(),
            Some(v) => v.as_u64().map(|v| v as u32).into_iter().collect(),
            None => Vec::new(),
        };
        let eos = self.generation.as_ref().map(ids).unwrap_or_default();
        if eos.is_empty() { ids(&self.config) } else { eos }
    }
}
