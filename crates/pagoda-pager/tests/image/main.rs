//! Images of a VM that an engine serves, and VMs that read one: real memory, real userfaultfds, real files. The VMM and its agent are played by
//! threads of the test; what a vCPU does is done through a mapping like a VMM's.

mod begins;
mod chain;
mod daemons;
mod disk;
mod ends;
mod fails;
mod files;
mod fills;
mod mappers;
mod moving;
mod prefetch;
mod reads;
mod tail;
mod vcpu;
mod vm;
