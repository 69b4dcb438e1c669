//! How the command and the benchmarks show results: numbers and times as text, tables, hex dumps,
//! progress bars and charts.
//!
//! This crate knows nothing of tracking or checkpoints. Without its feature `charts` it depends on
//! the C library only.
//!
//! | module | content |
//! |---|---|
//! | [`text`] | counts, byte counts, durations and moments as text, and durations from text |
//! | [`table`] | aligned columns |
//! | [`hex`] | hex dumps |
//! | [`bar`] | bars of characters |
//! | [`escape`] | text from elsewhere, without control characters |
//! | [`html`] | pages of tables and pictures, without anything from elsewhere |
//! | [`timeline`] | what ran where and when, as SVG |
//! | [`output`] | stdout whose reader may be gone, stderr that may be full |
//! | `samples`, `chart`, `plot` | with the feature `charts`: repeated measurements; their charts as text, CSV and SVG |
//!
//! # Example
//! ```
//! use pagemark_report::table::Table;
//! use pagemark_report::text;
//!
//! let mut table = Table::new(["mapping", ">size"]);
//! table.row(["[heap]".into(), text::bytes(132 << 10)]);
//! table.row(["[stack]".into(), text::bytes(8 << 20)]);
//! assert_eq!(table.to_string(), "mapping     size\n[heap]   132 KiB\n[stack]  8.0 MiB\n");
//! ```

pub mod bar;
#[cfg(feature = "charts")]
pub mod chart;
pub mod escape;
pub mod hex;
pub mod html;
pub mod output;
#[cfg(feature = "charts")]
pub mod plot;
#[cfg(feature = "charts")]
pub mod samples;
pub mod table;
pub mod text;
pub mod timeline;
