//! A calibrated profile on disk: JSON to be read again, or Rust source to be embedded.

use anyhow::{Context, Result, anyhow};
use hugemm_clear::{Best, Crossover, Mbps, Primitive, Profile};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// [`Profile`] as JSON. Crossovers are in bytes; absent means never.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    cached: Pair,
    bulk: Option<Pair>,
    crossover: Bytes,
    cached_mbps: u32,
    bulk_mbps: u32,
    /// Without vector registers. Files of older versions do not have these: not measured.
    #[serde(default)]
    cached_general_mbps: u32,
    #[serde(default)]
    bulk_general_mbps: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Pair {
    general: String,
    any: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Bytes {
    hot: Option<u64>,
    hot_touched: Option<u64>,
    cold: Option<u64>,
    cold_touched: Option<u64>,
}

/// `u64::MAX` means never; JSON says it with null.
fn finite(bytes: u64) -> Option<u64> {
    (bytes != u64::MAX).then_some(bytes)
}

fn pair(best: Best) -> Pair {
    Pair { general: best.general.name().into(), any: best.any.name().into() }
}

fn best(pair: &Pair) -> Result<Best> {
    let named = |name: &str| Primitive::from_name(name).ok_or_else(|| anyhow!("no primitive is called '{name}'"));
    Ok(Best { general: named(&pair.general)?, any: named(&pair.any)? })
}

/// The profile as a JSON value, as files and documents contain it.
pub fn to_json(profile: &Profile) -> serde_json::Result<String> {
    let c = &profile.crossover;
    let saved = Saved {
        cached: pair(profile.cached),
        bulk: profile.bulk.map(pair),
        crossover: Bytes {
            hot: finite(c.hot),
            hot_touched: finite(c.hot_touched),
            cold: finite(c.cold),
            cold_touched: finite(c.cold_touched),
        },
        cached_mbps: profile.cached_mbps.any,
        bulk_mbps: profile.bulk_mbps.any,
        cached_general_mbps: profile.cached_mbps.general,
        bulk_general_mbps: profile.bulk_mbps.general,
    };
    Ok(serde_json::to_string_pretty(&saved)? + "\n")
}

fn from_json(text: &str) -> Result<Profile> {
    let saved: Saved = serde_json::from_str(text)?;
    let c = &saved.crossover;
    let size = |bytes: Option<u64>| bytes.unwrap_or(u64::MAX);
    Ok(Profile {
        cached: best(&saved.cached)?,
        bulk: saved.bulk.as_ref().map(best).transpose()?,
        crossover: Crossover {
            hot: size(c.hot),
            hot_touched: size(c.hot_touched),
            cold: size(c.cold),
            cold_touched: size(c.cold_touched),
        },
        cached_mbps: Mbps { general: saved.cached_general_mbps, any: saved.cached_mbps },
        bulk_mbps: Mbps { general: saved.bulk_general_mbps, any: saved.bulk_mbps },
    })
}

pub fn to_rust(profile: &Profile) -> String {
    format!(
        "use hugemm_clear::Primitive::*;\nuse hugemm_clear::{{Best, Crossover, Mbps, Profile}};\n\n\
         /// Measured by `hugemm probe`; {} is never.\npub const PROFILE: Profile = {profile:#?};\n",
        u64::MAX
    )
}

pub fn save(path: &Path, profile: &Profile) -> Result<()> {
    let text = if path.extension().is_some_and(|e| e == "rs") { to_rust(profile) } else { to_json(profile)? };
    std::fs::write(path, text).with_context(|| format!("cannot write the profile to {}", path.display()))
}

pub fn load(path: &Path) -> Result<Profile> {
    let text = std::fs::read_to_string(path).with_context(|| {
        format!("cannot read the profile {}; make one with `hugemm probe --save-profile FILE`", path.display())
    })?;
    from_json(&text)
        .with_context(|| format!("{} is no profile; make one with `hugemm probe --save-profile {0}`", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile() -> Profile {
        Profile {
            cached: Best::only(Primitive::RepStosb),
            bulk: Some(Best { general: Primitive::Movnti, any: Primitive::Avx2Stream }),
            crossover: Crossover { hot: 8 << 20, hot_touched: u64::MAX, cold: 4096, cold_touched: 1 << 20 },
            cached_mbps: Mbps::only(15_000),
            bulk_mbps: Mbps { general: 20_000, any: 48_000 },
        }
    }

    #[test]
    fn json_leads_back() {
        for p in [profile(), Profile { bulk: None, ..profile() }] {
            assert_eq!(from_json(&to_json(&p).expect("json")).expect("profile"), p);
        }
        // A file of an older version: what it does not say was not measured.
        let old: String = to_json(&profile()).expect("json").replace("general_mbps", "unknown_mbps");
        assert_eq!(from_json(&old).expect("profile").bulk_mbps, Mbps { general: 0, any: 48_000 });
        assert!(from_json("{}").is_err());
        assert!(from_json(&to_json(&profile()).expect("json").replace("movnti", "movntx")).is_err());
    }

    #[test]
    fn rust_names_every_field() {
        let text = to_rust(&profile());
        for part in [
            "general: RepStosb,\n",
            "any: Avx2Stream,\n",
            "hot_touched: 18446744073709551615,\n",
            "bulk_mbps: Mbps {\n        general: 20000,\n        any: 48000,\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
