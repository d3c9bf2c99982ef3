//! Which file of a crate imports which, and by what name.
//!
//! An import is a path of `use`, or a path in the code, that leads to a definition in another file of the crate:
//! `crate::a::B`, `super::b::f()`, `a::C` below `use crate::a`. It counts for the file that defines what is named, also where
//! a module in between hands the name on with `pub use`. Handing on is no import by itself, and neither is to name a module.
//! Methods are not followed: who calls a method of a type imports nothing by it.

use std::collections::{BTreeMap, BTreeSet};

use super::Source;
use super::code::{Token, code_of, test_modules, tokens, without_tests};

/// Names per import, by its two files.
pub type Imports = BTreeMap<(String, String), BTreeSet<String>>;

/// A path of modules from the crate's root.
type ModulePath = Vec<String>;

/// The files in `src` (`crates/NAME/src/`) that are compiled not only for tests, each with the module that it is.
pub fn product_files<'a>(sources: &'a [Source], src: &str) -> Vec<(&'a Source, ModulePath)> {
    let of_crate = || sources.iter().filter(|source| source.path.starts_with(src) && source.path.ends_with(".rs"));
    let only_tests: Vec<ModulePath> = of_crate()
        .flat_map(|source| {
            let module = module_of(source, src);
            let code = code_of(&source.text);
            let names: Vec<String> = test_modules(&code).map(str::to_owned).collect();
            names.into_iter().map(move |name| [&module[..], &[name]].concat())
        })
        .collect();
    let is_product = |(_, module): &(&Source, ModulePath)| !only_tests.iter().any(|tests| module.starts_with(tests));
    of_crate().map(|source| (source, module_of(source, src))).filter(is_product).collect()
}

/// What a `use` brings into a file.
#[derive(Debug)]
struct Use {
    /// The module that it stands in.
    module: ModulePath,
    /// As written, without an alias; `*` at the end stands for all names.
    path: Vec<String>,
    /// The name that it gives to what it brings.
    name: String,
    is_public: bool,
}

#[derive(Debug)]
struct File {
    path: String,
    /// What it defines, by module: modules with a block have names of their own.
    defined: BTreeSet<(ModulePath, String)>,
    uses: Vec<Use>,
    /// Paths in the code, each with its module.
    paths: Vec<(ModulePath, Vec<String>)>,
    /// Words of the code outside of `use`.
    words: BTreeSet<String>,
}

struct Crate {
    files: Vec<File>,
    /// The file that each module is in.
    modules: BTreeMap<ModulePath, usize>,
}

/// The imports among the files of the crate whose sources are in `src` (`crates/NAME/src/`).
pub fn imports(sources: &[Source], src: &str) -> Imports {
    let whole = Crate::read(sources, src);
    let mut imports = Imports::new();
    for (index, file) in whole.files.iter().enumerate() {
        let handed_on = |used: &Use| used.is_public && !file.words.contains(&used.name);
        let used = file.uses.iter().filter(|used| !handed_on(used)).map(|used| (&used.module, &used.path));
        for (module, path) in used.chain(file.paths.iter().map(|(module, path)| (module, path))) {
            if let Some((target, name)) = whole.resolve(module, path, &mut BTreeSet::new())
                && target != index
            {
                let edge = (file.path.clone(), whole.files[target].path.clone());
                imports.entry(edge).or_default().insert(name);
            }
        }
    }
    imports
}

impl Crate {
    fn read(sources: &[Source], src: &str) -> Self {
        let mut whole = Self { files: Vec::new(), modules: BTreeMap::new() };
        for (source, module) in product_files(sources, src) {
            if source.is_test() {
                continue;
            }
            let file = Reader::read(source, module, &mut whole.modules, whole.files.len());
            whole.files.push(file);
        }
        whole
    }

    /// The file that `path`, written in `module`, leads to, and the name it has there. `None` for modules and other crates.
    ///
    /// `seen` has each `use` that was gone through, by its file and its place there: a name may be handed on in a loop.
    fn resolve(
        &self,
        module: &[String],
        path: &[String],
        seen: &mut BTreeSet<(usize, usize)>,
    ) -> Option<(usize, String)> {
        let mut current = module.to_vec();
        let mut rest = path;
        let mut is_relative = false;
        while let [first, behind @ ..] = rest {
            match first.as_str() {
                "crate" => current.clear(),
                "self" => {}
                "super" => drop(current.pop()),
                _ => break,
            }
            is_relative = true;
            rest = behind;
        }
        while let [name, behind @ ..] = rest {
            let below = [&current[..], std::slice::from_ref(name)].concat();
            if self.modules.contains_key(&below) {
                current = below;
                (rest, is_relative) = (behind, true);
                continue;
            }
            let index = *self.modules.get(&current)?;
            if self.files[index].defined.contains(&(current.clone(), name.clone())) {
                return Some((index, name.clone()));
            }
            let found = self.resolve_use(index, &current, rest, seen);
            // A word that nothing here defines: of another crate, or of the language.
            return found.or_else(|| is_relative.then(|| (index, name.clone())));
        }
        None
    }

    /// `path`, whose first name a `use` of `module` brings in.
    fn resolve_use(
        &self,
        index: usize,
        module: &[String],
        path: &[String],
        seen: &mut BTreeSet<(usize, usize)>,
    ) -> Option<(usize, String)> {
        let (name, behind) = path.split_first()?;
        let uses = || self.files[index].uses.iter().enumerate().filter(|(_, used)| used.module == module);
        for (number, used) in uses() {
            if used.name == *name && seen.insert((index, number)) {
                return self.resolve(module, &[&used.path[..], behind].concat(), seen);
            }
        }
        for (number, glob) in uses().filter(|(_, used)| used.name == "*") {
            if !seen.insert((index, number)) {
                continue;
            }
            let from = &glob.path[..glob.path.len() - 1];
            let found = self.resolve(module, &[from, path].concat(), seen);
            // A file that does not define the name is where it was looked for, not where it is.
            let defines = |(target, name): &(usize, String)| {
                self.files[*target].defined.iter().any(|(_, defined)| defined == name)
            };
            if let Some(found) = found.filter(defines) {
                return Some(found);
            }
        }
        None
    }
}

/// The module that a file is: `src/a/b.rs` and `src/a/b/mod.rs` are `a::b`.
fn module_of(source: &Source, src: &str) -> ModulePath {
    let inside = source.path.trim_start_matches(src).trim_end_matches(".rs");
    let mut module: ModulePath = inside.split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod") || inside == "lib" || inside == "main" {
        module.pop();
    }
    module
}

/// Goes through the tokens of a file once.
struct Reader<'a> {
    tokens: Vec<Token<'a>>,
    at: usize,
    file: File,
    /// The module at `at`, and the depths of the blocks of modules that it is in.
    module: ModulePath,
    blocks: Vec<usize>,
    depth: usize,
}

impl Reader<'_> {
    fn read(source: &Source, module: ModulePath, modules: &mut BTreeMap<ModulePath, usize>, index: usize) -> File {
        let code = without_tests(&code_of(&source.text));
        let file = File {
            path: source.path.clone(),
            defined: BTreeSet::new(),
            uses: Vec::new(),
            paths: Vec::new(),
            words: BTreeSet::new(),
        };
        let tokens = tokens(&code).map(|(_, token)| token).collect();
        modules.insert(module.clone(), index);
        let mut reader = Reader { tokens, at: 0, file, module, blocks: Vec::new(), depth: 0 };
        while reader.at < reader.tokens.len() {
            if let Some(inline) = reader.step() {
                modules.insert(inline, index);
            }
        }
        reader.file
    }

    /// Takes in what begins here. Returns a module that has its block in this file.
    fn step(&mut self) -> Option<ModulePath> {
        match self.tokens[self.at..] {
            [Token::Word("use"), ..] => {
                let is_public = self.is_public();
                self.at += 1;
                self.read_use(&[], is_public);
                return None;
            }
            [Token::Word("mod"), Token::Word(name), Token::Other('{'), ..] => {
                self.module.push(name.to_owned());
                self.blocks.push(self.depth);
                self.depth += 1;
                self.at += 3;
                return Some(self.module.clone());
            }
            [Token::Word("mod"), Token::Word(_), Token::Other(';'), ..] => self.at += 3,
            [Token::Word("macro_rules"), Token::Other('!'), Token::Word(name), ..] => {
                self.define(name.to_owned());
                self.at += 3;
                self.skip_block();
            }
            [Token::Word(kind), Token::Word(name), ..] if defines(kind) => {
                self.define(name.to_owned());
                self.at += 2;
            }
            [Token::Word(_), ..] => self.read_path(),
            [Token::Other('{'), ..] => {
                self.depth += 1;
                self.at += 1;
            }
            [Token::Other('}'), ..] => {
                self.depth = self.depth.saturating_sub(1);
                if self.blocks.last() == Some(&self.depth) {
                    self.blocks.pop();
                    self.module.pop();
                }
                self.at += 1;
            }
            _ => self.at += 1,
        }
        None
    }

    /// What a macro's rules import is for the places where it is used.
    fn skip_block(&mut self) {
        let mut depth = 0_usize;
        while let Some(token) = self.tokens.get(self.at) {
            match token {
                Token::Other('{') => depth += 1,
                Token::Other('}') => depth = depth.saturating_sub(1),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }

    fn define(&mut self, name: String) {
        self.file.defined.insert((self.module.clone(), name));
    }

    /// Whether the item whose keyword is at `at` has `pub` before it, with or without a scope.
    fn is_public(&self) -> bool {
        matches!(
            self.tokens[..self.at],
            [.., Token::Word("pub")] | [.., Token::Word("pub"), Token::Other('('), Token::Word(_), Token::Other(')')]
        )
    }

    /// A path in the code, or a word alone.
    fn read_path(&mut self) {
        // What follows a dot is a field or a method.
        let is_member = self.at > 0 && self.tokens[self.at - 1] == Token::Other('.');
        let mut path = Vec::new();
        while let Some(Token::Word(word)) = self.tokens.get(self.at) {
            path.push((*word).to_owned());
            self.at += 1;
            if self.tokens.get(self.at) != Some(&Token::PathSeparator) {
                break;
            }
            self.at += 1;
        }
        self.file.words.extend(path.first().cloned());
        if path.len() > 1 && !is_member {
            self.file.paths.push((self.module.clone(), path));
        }
    }

    /// One branch of a `use`, behind `prefix`; `at` is at its first name.
    fn read_use(&mut self, prefix: &[String], is_public: bool) {
        let mut path = prefix.to_vec();
        loop {
            let token = self.tokens.get(self.at).copied();
            self.at += 1;
            match token {
                Some(Token::Word("as")) => {
                    if let Some(Token::Word(name)) = self.tokens.get(self.at).copied() {
                        self.add_use(path, name.to_owned(), is_public);
                        self.at += 1;
                    }
                    return;
                }
                Some(Token::Word(word)) => path.push(word.to_owned()),
                Some(Token::Other('*')) => path.push("*".to_owned()),
                Some(Token::PathSeparator) => {}
                Some(Token::Other('{')) => {
                    while !matches!(self.tokens.get(self.at), Some(Token::Other('}')) | None) {
                        self.read_use(&path, is_public);
                        if self.tokens.get(self.at) == Some(&Token::Other(',')) {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    return;
                }
                _ => {
                    // `,`, `;` or `}` ends the branch and belongs to who called.
                    self.at -= 1;
                    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
                        path.pop();
                    }
                    if let Some(name) = path.last().cloned() {
                        self.add_use(path, name, is_public);
                    }
                    if self.tokens.get(self.at) == Some(&Token::Other(';')) && prefix.is_empty() {
                        self.at += 1;
                    }
                    return;
                }
            }
        }
    }

    fn add_use(&mut self, path: Vec<String>, name: String, is_public: bool) {
        self.file.uses.push(Use { module: self.module.clone(), path, name, is_public });
    }
}

fn defines(keyword: &str) -> bool {
    ["fn", "struct", "enum", "trait", "type", "const", "static", "union"].contains(&keyword)
}
