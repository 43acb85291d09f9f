"use strict";
Object.defineProperty(exports, "__esModule", { value: true });
exports.native = void 0;
const node_fs_1 = require("node:fs");
const node_path_1 = require("node:path");
// One `require` per platform with a literal name, so that a bundler finds the addon.
const ADDONS = {
    'linux-x64-gnu': () => require('holdfast-linux-x64-gnu'),
    'linux-x64-musl': () => require('holdfast-linux-x64-musl'),
    'linux-arm64-gnu': () => require('holdfast-linux-arm64-gnu'),
    'linux-arm64-musl': () => require('holdfast-linux-arm64-musl'),
    'darwin-x64': () => require('holdfast-darwin-x64'),
    'darwin-arm64': () => require('holdfast-darwin-arm64'),
    'win32-x64-msvc': () => require('holdfast-win32-x64-msvc'),
};
function open(path) {
    const opened = { exports: {} };
    process.dlopen(opened, path);
    return opened.exports;
}
function load() {
    const given = process.env['NAPI_RS_NATIVE_LIBRARY_PATH'];
    if (given)
        return open(given);
    const platform = `${process.platform}-${process.arch}`;
    let cause;
    // On Linux, the package for glibc does not load where the C library is musl.
    for (const target of Object.keys(ADDONS).filter((target) => target.startsWith(platform))) {
        try {
            const built = (0, node_path_1.join)(__dirname, '..', `holdfast.${target}.node`);
            return (0, node_fs_1.existsSync)(built) ? open(built) : ADDONS[target]();
        }
        catch (error) {
            cause ??= error;
        }
    }
    throw new Error(`holdfast has no native addon for ${platform} here: install it with its optional dependencies ` +
        '(npm install holdfast --include=optional), or build it from a checkout with `npm run build`, which needs Rust.', { cause });
}
/** @internal */
exports.native = load();
