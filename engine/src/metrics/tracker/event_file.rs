//! `TensorBoard`'s event files: records in `TFRecord` framing, each an `Event` of TensorFlow's protocol buffers.
//!
//! The messages have the fields of `event.proto` and `summary.proto` that are used here; members of a `oneof` are
//! optional fields, which is equal on the wire.

use prost::Message;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// `Event.file_version` of the first event of a file.
const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.START`: invalidates the values of earlier sessions from this step on.
const SESSION_START: i32 = 1;

/// `DataType.DT_STRING`.
const DT_STRING: i32 = 7;

/// `DataClass.DATA_CLASS_TENSOR`.
const DATA_CLASS_TENSOR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(super) struct EventProto {
    #[prost(double, tag = "1")]
    pub wall_time: f64,
    #[prost(int64, tag = "2")]
    pub step: i64,
    #[prost(string, optional, tag = "3")]
    pub file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub summary: Option<SummaryProto>,
    #[prost(message, optional, tag = "7")]
    pub session_log: Option<SessionLog>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SessionLog {
    #[prost(int32, tag = "1")]
    pub status: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryProto {
    #[prost(message, repeated, tag = "1")]
    pub value: Vec<SummaryValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub tag: String,
    #[prost(float, optional, tag = "2")]
    pub simple_value: Option<f32>,
    #[prost(message, optional, tag = "8")]
    pub tensor: Option<TensorProto>,
    #[prost(message, optional, tag = "9")]
    pub metadata: Option<SummaryMetadata>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SummaryMetadata {
    #[prost(message, optional, tag = "1")]
    pub plugin_data: Option<PluginData>,
    #[prost(int32, tag = "4")]
    pub data_class: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct PluginData {
    #[prost(string, tag = "1")]
    pub plugin_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int32, tag = "1")]
    pub dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub tensor_shape: Option<TensorShape>,
    #[prost(bytes = "vec", repeated, tag = "8")]
    pub string_val: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShape {
    #[prost(message, repeated, tag = "2")]
    pub dim: Vec<Dim>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Dim {
    #[prost(int64, tag = "1")]
    pub size: i64,
}

impl EventProto {
    fn at(step: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        Self { wall_time: now.map_or(0.0, |since| since.as_secs_f64()), step: step as i64, ..Self::default() }
    }

    /// The first event of a file.
    pub fn version() -> Self {
        Self { file_version: Some(FILE_VERSION.into()), ..Self::at(0) }
    }

    /// A session with the first step `step`, which invalidates the values of earlier sessions from it on.
    pub fn session_start(step: u64) -> Self {
        Self { session_log: Some(SessionLog { status: SESSION_START }), ..Self::at(step) }
    }

    /// Numbers under their names, in f32 as `TensorFlow`'s scalars.
    pub fn scalars<'a>(step: u64, values: impl Iterator<Item = (&'a String, &'a f64)>) -> Self {
        let value = values.map(|(tag, value)| SummaryValue {
            tag: tag.clone(),
            simple_value: Some(*value as f32),
            ..SummaryValue::default()
        });
        Self::summary(step, value.collect())
    }

    /// A text in Markdown, for the plugin `text`.
    pub fn text(step: u64, tag: &str, markdown: &str) -> Self {
        let value = SummaryValue {
            tag: tag.into(),
            tensor: Some(TensorProto {
                dtype: DT_STRING,
                tensor_shape: Some(TensorShape { dim: vec![Dim { size: 1 }] }),
                string_val: vec![markdown.as_bytes().to_vec()],
            }),
            metadata: Some(SummaryMetadata {
                plugin_data: Some(PluginData { plugin_name: "text".into() }),
                data_class: DATA_CLASS_TENSOR,
            }),
            ..SummaryValue::default()
        };
        Self::summary(step, vec![value])
    }

    fn summary(step: u64, value: Vec<SummaryValue>) -> Self {
        Self { summary: Some(SummaryProto { value }), ..Self::at(step) }
    }

    /// Appends the event as a record: its length, the length's checksum, the event, its checksum.
    pub fn frame(&self, records: &mut Vec<u8>) {
        let data = self.encode_to_vec();
        let length = (data.len() as u64).to_le_bytes();
        records.extend(length);
        records.extend(masked_crc(&length).to_le_bytes());
        records.extend(&data);
        records.extend(masked_crc(&data).to_le_bytes());
    }
}

/// Checksum of `TFRecord`: a masked CRC-32C, since checksums of data with checksums are weak.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// An event file, which always has complete records.
#[derive(Debug)]
pub(super) struct EventFile {
    file: File,
    /// Bytes of complete records.
    length: u64,
}

impl EventFile {
    /// Creates a file in a folder, and the folder. Its name sorts after those of earlier sessions: `TensorBoard` reads
    /// by name.
    pub fn create(folder: &Path) -> io::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let earlier = std::fs::read_dir(folder)?.count();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let seconds = now.map_or(0, |since| since.as_secs());
        let name = format!("events.out.tfevents.{seconds:010}.firebrick.{earlier:04}");
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true);
        Ok(Self { file: file.open(folder.join(name))?, length: 0 })
    }

    /// Appends records. After a failure the file is unchanged.
    pub fn append(&mut self, records: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(self.length))?;
        let written = self.file.write_all(records);
        if written.is_ok() {
            self.length += records.len() as u64;
        } else {
            // the first error is the one to report; readers skip incomplete records
            let _ = self.file.set_len(self.length);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_framed_as_tensorflow_does() {
        // by a CRC-32C computed bit by bit in Python
        let length = 24_u64.to_le_bytes();
        assert_eq!(masked_crc(&length), 0x224b_7fa3);
        assert_eq!(masked_crc(b""), 0xa282_ead8);
        let mut records = Vec::new();
        EventProto { wall_time: 1.5, ..EventProto::version() }.frame(&mut records);
        let data = &records[12..records.len() - 4];
        assert_eq!(data.len(), 24);
        assert_eq!(records[..8], length);
        let event = EventProto::decode(data).unwrap();
        assert_eq!(event.file_version.as_deref(), Some(FILE_VERSION));
        assert_eq!(event.wall_time.to_bits(), 1.5_f64.to_bits());
    }
}
