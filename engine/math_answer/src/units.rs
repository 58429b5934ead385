//! Units of measure, to distinguish answers in different units.

/// Spellings of every unit; the first is its name.
const UNITS: [&[&str]; 40] = [
    &["cm", "centimeter", "centimetre"],
    &["mm", "millimeter", "millimetre"],
    &["km", "kilometer", "kilometre"],
    &["m", "meter", "metre"],
    &["in", "inch", "inche"],
    &["ft", "foot", "feet"],
    &["yd", "yard"],
    &["mi", "mile"],
    &["kg", "kilogram"],
    &["mg", "milligram"],
    &["g", "gram"],
    &["lb", "lbs", "pound"],
    &["oz", "ounce"],
    &["t", "ton", "tonne"],
    &["ml", "milliliter", "millilitre"],
    &["l", "liter", "litre"],
    &["gal", "gallon"],
    &["ms", "millisecond"],
    &["s", "sec", "second"],
    &["min", "minute"],
    &["h", "hr", "hour"],
    &["day"],
    &["week"],
    &["month"],
    &["year", "yr"],
    &["mph"],
    &["kmh", "km/h", "kph"],
    &["dollar", "usd", "$"],
    &["cent"],
    &["euro", "eur", "€"],
    &["£", "gbp"],
    &["deg", "degree", "°"],
    &["rad", "radian"],
    &["j", "joule"],
    &["n", "newton"],
    &["w", "watt"],
    &["v", "volt"],
    &["hz", "hertz"],
    &["cm^2", "cm2", "square centimeter", "sq cm"],
    &["m^2", "m2", "square meter", "sq m"],
];

/// The unit of a text, in any spelling, singular or plural.
pub(crate) fn unit(text: &str) -> Option<&'static str> {
    let text = text.trim().trim_end_matches('.').to_lowercase();
    let singular = text.strip_suffix('s').unwrap_or(&text);
    let spelt = |names: &&&[&str]| names.iter().any(|name| *name == text || *name == singular);
    UNITS.iter().find(spelt).map(|names| names[0])
}
