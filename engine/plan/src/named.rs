//! Enums whose values have names in files.

/// Declares an enum with the name of each variant: for serde, as `name`, and with all variants as `ALL`.
macro_rules! named {
    ($(#[$meta:meta])* pub enum $Enum:ident { $($(#[$doc:meta])* $Variant:ident = $name:literal,)+ }) => {
        $(#[$meta])*
        pub enum $Enum {
            $($(#[$doc])* #[serde(rename = $name)] $Variant,)+
        }

        impl $Enum {
            /// All of them, in their order.
            pub const ALL: [Self; [$(Self::$Variant),+].len()] = [$(Self::$Variant),+];

            /// Its name in files.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)+
                }
            }
        }
    };
}
pub(crate) use named;
