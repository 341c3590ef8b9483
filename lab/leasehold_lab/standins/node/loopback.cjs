// Loaded before a service that would listen on every interface, to make it listen on the loopback interface only.
const net = require("node:net");

const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (where, ...rest) {
  const options = typeof where === "object" ? where : { port: where };
  const whenListening = rest.filter((argument) => typeof argument === "function");
  return listen.call(this, { ...options, host: "127.0.0.1" }, ...whenListening);
};
