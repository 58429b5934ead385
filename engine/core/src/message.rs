//! Values as the bytes that ranks exchange (`postcard`). Both ends are the same program, so no byte says what it is of.
//! Numbers keep their bits, NaN included.

use crate::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The bytes of a value. Types that leave out fields, and JSON values, have no form of their own here: a field of such
/// a type is [`json`].
///
/// # Errors
/// `Error::Ranks` for a value without a form.
pub fn encode(value: &(impl Serialize + ?Sized)) -> Result<Vec<u8>> {
    postcard::to_allocvec(value).map_err(|e| Error::Ranks(format!("a message to other ranks cannot be written ({e})")))
}

/// The value that another rank encoded.
///
/// # Errors
/// `Error::Ranks` for bytes that are not one such value.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    let other = |what: String| {
        Error::Ranks(format!(
            "a message of another rank cannot be read ({what}); run the same build of the program on every rank"
        ))
    };
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(other(format!("{} bytes are left", rest.len()))),
        Err(e) => Err(other(e.to_string())),
    }
}

/// A field as JSON text, for `#[serde(with = …)]`: texts, whole numbers and finite ones.
pub mod json {
    use serde::de::{DeserializeOwned, Error as _};
    use serde::ser::Error as _;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes it.
    ///
    /// # Errors
    /// If the value has no form in JSON.
    pub fn serialize<T: Serialize, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        serde_json::to_string(value).map_err(S::Error::custom)?.serialize(to)
    }

    /// Reads it.
    ///
    /// # Errors
    /// If the text is not one of the type.
    pub fn deserialize<'de, T: DeserializeOwned, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        serde_json::from_str(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_models::routing::Routes;

    #[test]
    fn values_arrive_to_the_bit_and_what_is_cut_or_longer_is_refused() {
        type Sent = (Option<f64>, Option<f64>, String, Vec<u32>, Vec<f64>, Vec<f32>, Routes);
        let bits = |values: &[f64]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let floats = [f64::NAN, f64::from_bits(0x7ff8_0000_0000_0001), -0.0, 1e-310, f64::NEG_INFINITY];
        let routes = Routes::from_rows(&[&[0, 7], &[Routes::UNKNOWN, 1]]);
        let sent: Sent = (Some(f64::NAN), None, "größer".into(), vec![7, u32::MAX], floats.into(), vec![0.1], routes);
        let bytes = encode(&sent).unwrap();
        let received: Sent = decode(&bytes).unwrap();
        assert_eq!(received.0.map(f64::to_bits), Some(f64::NAN.to_bits()));
        assert_eq!(
            (received.1, &received.2, &received.3, &received.5, &received.6),
            (None, &sent.2, &sent.3, &sent.5, &sent.6)
        );
        assert_eq!(bits(&received.4), bits(&floats));
        for len in 0..bytes.len() {
            let short = decode::<Sent>(&bytes[..len]).unwrap_err().to_string();
            assert!(short.contains("same build"), "{short}");
        }
        let longer = decode::<Sent>(&[&bytes[..], &[0]].concat()).unwrap_err().to_string();
        assert!(longer.contains("1 bytes are left") && longer.contains("same build"), "{longer}");
    }
}
