// A heap in many places, workers, children, a connection, WebAssembly, and code that is compiled.

const { Worker, isMainThread, parentPort } = require('worker_threads');
const zlib = require('zlib'), crypto = require('crypto'), net = require('net');
const { execSync } = require('child_process');

function sum(n) {
    let value = 0;
    for (let i = 0; i < n; i++)
        value = (value * 31 + i) | 0;
    return value;
}

if (!isMainThread) {
    parentPort.postMessage(sum(3e6));
} else {
    const objects = [];
    for (let i = 0; i < 2e5; i++)
        objects.push({ number: i, text: 'text ' + i });
    const packed = zlib.gzipSync(JSON.stringify(objects));
    console.log(crypto.createHash('sha256').update(zlib.gunzipSync(packed)).digest('hex'));
    console.log(execSync('echo a child').toString());
    // (module (func (export "add") (param i32 i32) (result i32) local.get 0 local.get 1 i32.add))
    const code = Buffer.from('0061736d0100000001070160027f7f017f030201000707010361646400000a09010700200020016a0b', 'hex');
    console.log(new WebAssembly.Instance(new WebAssembly.Module(code)).exports.add(40, 2));
    const worker = new Worker(__filename);
    worker.on('message', value => {
        console.log(value);
        const server = net.createServer(connection => connection.end('a server')).listen(0, () => {
            net.connect(server.address().port).on('data', data => {
                console.log(data.toString());
                server.close();
            });
        });
    });
}
