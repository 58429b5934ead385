//! A section with a key of every sort, written flat.

use super::*;
use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Section of a test.
#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
#[schemars(transform = with_shape)]
struct Section {
    /// Name.
    name: String,
    /// Shape with its settings.
    #[serde(flatten, deserialize_with = "flat_choice")]
    #[schemars(skip)]
    shape: Shape,
    /// True if it is filled.
    filled: bool,
    /// Color of the filling.
    #[schemars(extend("x-with" = "filled"))]
    color: Option<Color>,
    /// Part with another default in this place.
    #[serde(skip_serializing_if = "Option::is_none")]
    part: Option<Part>,
}

/// Shape.
#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(tag = "shape", rename_all = "snake_case")]
enum Shape {
    /// Circle.
    #[serde(alias = "disc")]
    #[schemars(extend("x-alias" = ["disc"]))]
    Circle(Circle),
    /// Point.
    Point,
}

/// Settings of a circle.
#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default)]
struct Circle {
    /// Radius.
    #[schemars(extend("exclusiveMaximum" = 9, "x-because" = "it has to fit"))]
    radius: f64,
}

/// Color.
#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Color {
    Red,
    Green,
}

/// Part.
#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Part {
    /// Sizes of it.
    #[schemars(inner(range(min = 1)))]
    sizes: Vec<u8>,
    /// Count of it.
    #[schemars(extend("not" = {"const": 3}))]
    count: u8,
}

impl Default for Shape {
    fn default() -> Self {
        Self::Circle(Circle::default())
    }
}

impl Default for Part {
    fn default() -> Self {
        Self { sizes: Vec::new(), count: 7 }
    }
}

fn with_shape(schema: &mut Schema) {
    add_choice::<Shape>(schema, "name");
    schema.insert("additionalProperties".to_owned(), false.into());
}

fn messages(value: &Value) -> Vec<String> {
    violations(&schema_of::<Section>(), value).into_iter().map(|violation| violation.message).collect()
}

#[test]
fn the_settings_of_a_variant_stand_beside_its_name() {
    let read = |value: Value| serde_json::from_value::<Section>(value).expect("a section");
    assert_eq!(read(json!({"radius": 2})).shape, Shape::Circle(Circle { radius: 2.0 }));
    assert_eq!(read(json!({"shape": "point", "radius": 2})).shape, Shape::Point);
    let written = serde_json::to_value(read(json!({"shape": "disc"}))).expect("a value");
    assert_eq!(written, json!({"name": "", "shape": "circle", "radius": 0.0, "filled": false, "color": null}));
    let keys = keys(&schema_of::<Section>());
    let paths: Vec<&str> = keys.iter().map(|key| key.path.as_str()).collect();
    assert_eq!(paths, ["name", "shape", "radius", "filled", "color", "part", "part.sizes", "part.count"]);
    assert_eq!(keys[2].with, Some(("shape".to_owned(), vec!["circle".to_owned()])));
}

#[test]
fn every_mistake_says_what_was_expected_and_what_was_found() {
    for (value, message) in [
        (json!({"shape": "squar"}), "shape: unknown value `squar`; did you mean `circle`? Known: circle, point, disc"),
        (json!({"shape": "point", "radius": 2}), "radius requires shape: circle; it is point"),
        (json!({"radius": 9}), "radius must be below 9, found 9: it has to fit"),
        (json!({"color": "red"}), "color requires filled"),
        (json!({"filled": 1}), "filled must be true or false, found 1"),
        (json!({"nam": 1}), "unknown key `nam`; did you mean `name`? Known: name, shape, radius, filled, color, part"),
        (json!({"part": {"sizes": [2, 0]}}), "part.sizes.1 must be at least 1, found 0"),
        (json!({"part": {"count": 3}}), "part.count must not be 3"),
        (json!({"part": {"size": 3}}), "part: unknown key `size`; did you mean `sizes`? Known: sizes, count"),
        (json!({"part": 3}), "part must be a section or null, found 3"),
    ] {
        assert_eq!(messages(&value), [message]);
    }
    for fine in [json!({"shape": "disc", "radius": 2}), json!({"shape": "point", "radius": 0}), json!({"color": null})]
    {
        assert_eq!(messages(&fine), [""; 0]);
    }
}

#[test]
fn keys_that_a_section_leaves_out_get_the_defaults_of_their_place() {
    let mut value = json!({"part": {"sizes": [1]}});
    lay_defaults(&schema_of::<Section>(), &mut value);
    let expected =
        json!({"part": {"sizes": [1], "count": 7}, "name": "", "shape": "circle", "radius": 0.0, "filled": false});
    assert_eq!(value, expected);
}
