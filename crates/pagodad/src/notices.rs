//! What engines report by themselves, and what is done about it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::{Builder, JoinHandle};

use pagoda_abi::Token;
use pagoda_pager::handle::Notice;

use crate::registry::Registry;
use crate::snapshots;

/// Handles notices until the last sender is gone. What may wait for a disk has a thread of its own, for other VMs' notices do not
/// wait. A VM's end waits for what its engine said of an image before.
pub fn listen(registry: &Arc<Registry>, notices: &Receiver<(Token, Notice)>) {
    let mut of_images: HashMap<Token, JoinHandle<()>> = HashMap::new();
    while let Ok((token, notice)) = notices.recv() {
        let Some(id) = registry.id_by(token) else { continue };
        of_images.retain(|_, thread| !thread.is_finished());
        let before = of_images.remove(&token);
        let thread = match notice {
            Notice::Stalled(reason) => {
                registry.stall(id, reason);
                before
            }
            Notice::NearLimit => {
                registry.governor.doorbell.ring();
                before
            }
            Notice::ImageFilled(image) => {
                in_thread("image", registry, before, move |registry| snapshots::finish(registry, id, image))
            }
            Notice::ImageLost(image, why) => {
                in_thread("image", registry, before, move |registry| snapshots::lost(registry, id, image, &why))
            }
            Notice::Exited => {
                drop(in_thread("vm-end", registry, before, move |registry| registry.exited(id)));
                None
            }
            Notice::Detached => {
                registry.find_by_id(id, |vm| vm.handle = None);
                before
            }
        };
        of_images.extend(thread.map(|thread| (token, thread)));
    }
}

/// Does something after what was begun `before` it. Does it here if there can be no thread.
fn in_thread(
    name: &str,
    registry: &Arc<Registry>,
    before: Option<JoinHandle<()>>,
    act: impl FnOnce(&Arc<Registry>) + Clone + Send + 'static,
) -> Option<JoinHandle<()>> {
    let (theirs, their_act) = (Arc::clone(registry), act.clone());
    let run = move || {
        // A thread that panics takes the daemon with it.
        let _ = before.map(JoinHandle::join);
        their_act(&theirs);
    };
    match Builder::new().name(name.into()).spawn(run) {
        Ok(thread) => Some(thread),
        Err(_) => {
            act(registry);
            None
        }
    }
}
