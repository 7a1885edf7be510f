//! `hugemm report FILE…`: saved results as one HTML page, or in the tables of a Markdown page that is there.
//!
//! The way of a figure: `content` sorts the rows of all documents by command and metric, `plot` by their labels; `draw` draws what is a
//! line, `html` writes all down.

mod content;
mod draw;
mod fill;
mod html;
mod machine;
mod plot;
#[cfg(test)]
mod tests;

use crate::document;
use crate::saved::{Saved, same_schema};
use crate::unmeasured_args::Report;
use anyhow::{Context, Result, bail};
use content::Content;
use std::path::{Path, PathBuf};

/// Where the page goes if nothing else is asked for.
const DEFAULT: &str = "hugemm-report.html";

pub fn run(args: &Report) -> Result<()> {
    document::check_writable(args.html.as_deref())?;
    let documents = args.files.iter().map(|file| Ok((stem(file), Saved::read(file)?))).collect::<Result<Vec<_>>>()?;
    if documents.iter().all(|(_, saved)| saved.results.is_empty()) {
        bail!("there is no figure in {}; nothing was written", names(&args.files));
    }
    let saved = || args.files.iter().zip(documents.iter().map(|(_, saved)| saved));
    same_schema(saved())?;
    if !args.fill.is_empty()
        && let Some((file, old)) = saved().find(|(_, saved)| saved.schema != document::SCHEMA)
    {
        bail!(
            "{} has schema {}: its goals were measured differently from those that the page defines; measure again",
            file.display(),
            old.schema
        );
    }
    let content = Content::of(&documents);
    for page in &args.fill {
        let text = std::fs::read_to_string(page).with_context(|| format!("cannot read {}", page.display()))?;
        let Some(filled) = fill::filled(&text, &content) else {
            bail!("{} has no mark '<!-- goals -->' to fill", page.display());
        };
        write(page, &filled)?;
        println!("figures put into {}", page.display());
    }
    let default = args.fill.is_empty().then(|| PathBuf::from(DEFAULT));
    if let Some(file) = args.html.clone().or(default) {
        write(&file, &html::page(&content))?;
        println!("report written to {}", file.display());
    }
    Ok(())
}

fn write(file: &Path, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// A document's name: its file's, without the ending.
fn stem(file: &Path) -> String {
    file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}

fn names(files: &[PathBuf]) -> String {
    files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ")
}
