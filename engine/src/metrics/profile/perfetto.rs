//! Perfetto's trace format: `TracePacket`s of its protocol buffers, with the fields that are used here.
//!
//! A file is a `Trace` message, whose packets are one repeated field: files and parts of files can be concatenated.

use prost::Message;

/// `TracePacket.sequence_flags`: nothing of earlier packets is referred to.
const SEQ_INCREMENTAL_STATE_CLEARED: u32 = 1;

/// The one sequence of packets.
const SEQUENCE: u32 = 1;

/// `CounterDescriptor.Unit.UNIT_SIZE_BYTES`.
const UNIT_SIZE_BYTES: i32 = 3;

/// `TrackEvent.Type`.
const SLICE_BEGIN: i32 = 1;
const SLICE_END: i32 = 2;
const COUNTER: i32 = 4;

/// A track: a row of the viewer. The track of the process is the parent of all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Track(pub u64);

#[derive(Clone, PartialEq, Message)]
pub(super) struct Trace {
    #[prost(message, repeated, tag = "1")]
    pub packet: Vec<TracePacket>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TracePacket {
    /// Nanoseconds.
    #[prost(uint64, optional, tag = "8")]
    pub timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    pub trusted_packet_sequence_id: u32,
    #[prost(message, optional, tag = "11")]
    pub track_event: Option<TrackEvent>,
    #[prost(uint32, optional, tag = "13")]
    pub sequence_flags: Option<u32>,
    #[prost(message, optional, tag = "60")]
    pub track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    pub debug_annotations: Vec<DebugAnnotation>,
    #[prost(int32, tag = "9")]
    pub r#type: i32,
    #[prost(uint64, tag = "11")]
    pub track_uuid: u64,
    #[prost(string, repeated, tag = "22")]
    pub categories: Vec<String>,
    #[prost(string, optional, tag = "23")]
    pub name: Option<String>,
    #[prost(int64, optional, tag = "30")]
    pub counter_value: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct DebugAnnotation {
    #[prost(double, optional, tag = "5")]
    pub double_value: Option<f64>,
    #[prost(string, optional, tag = "10")]
    pub name: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub uuid: u64,
    #[prost(string, optional, tag = "2")]
    pub name: Option<String>,
    #[prost(message, optional, tag = "3")]
    pub process: Option<ProcessDescriptor>,
    #[prost(uint64, optional, tag = "5")]
    pub parent_uuid: Option<u64>,
    #[prost(message, optional, tag = "8")]
    pub counter: Option<CounterDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessDescriptor {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    #[prost(string, tag = "6")]
    pub process_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CounterDescriptor {
    #[prost(int32, tag = "3")]
    pub unit: i32,
}

impl TracePacket {
    fn event(nanoseconds: u64, event: TrackEvent) -> Self {
        Self { timestamp: Some(nanoseconds), track_event: Some(event), ..Self::empty() }
    }

    fn empty() -> Self {
        Self { trusted_packet_sequence_id: SEQUENCE, ..Self::default() }
    }

    /// The process of all tracks. The first packet of a file.
    pub fn process(track: Track, name: &str) -> Self {
        Self {
            sequence_flags: Some(SEQ_INCREMENTAL_STATE_CLEARED),
            track_descriptor: Some(TrackDescriptor {
                uuid: track.0,
                process: Some(ProcessDescriptor { pid: std::process::id() as i32, process_name: name.into() }),
                ..TrackDescriptor::default()
            }),
            ..Self::empty()
        }
    }

    /// A track of slices.
    pub fn track(track: Track, parent: Track, name: &str) -> Self {
        Self {
            track_descriptor: Some(TrackDescriptor {
                uuid: track.0,
                name: Some(name.into()),
                parent_uuid: Some(parent.0),
                ..TrackDescriptor::default()
            }),
            ..Self::empty()
        }
    }

    /// A track of bytes.
    pub fn counter_track(track: Track, parent: Track, name: &str) -> Self {
        let mut packet = Self::track(track, parent, name);
        if let Some(descriptor) = &mut packet.track_descriptor {
            descriptor.counter = Some(CounterDescriptor { unit: UNIT_SIZE_BYTES });
        }
        packet
    }

    /// Begins a slice, which shows `flops` if they are counted.
    pub fn begin(track: Track, at: u64, name: String, category: &str, flops: f64) -> Self {
        let flops = (flops > 0.0).then(|| DebugAnnotation { name: Some("flops".into()), double_value: Some(flops) });
        let event = TrackEvent {
            debug_annotations: flops.into_iter().collect(),
            r#type: SLICE_BEGIN,
            track_uuid: track.0,
            categories: vec![category.into()],
            name: Some(name),
            counter_value: None,
        };
        Self::event(at, event)
    }

    /// Ends the innermost open slice of a track.
    pub fn end(track: Track, at: u64) -> Self {
        let event = TrackEvent { r#type: SLICE_END, track_uuid: track.0, ..TrackEvent::default() };
        Self::event(at, event)
    }

    /// The value of a counter from now on.
    pub fn count(track: Track, at: u64, bytes: u64) -> Self {
        let event = TrackEvent {
            r#type: COUNTER,
            track_uuid: track.0,
            counter_value: Some(i64::try_from(bytes).unwrap_or(i64::MAX)),
            ..TrackEvent::default()
        };
        Self::event(at, event)
    }
}
