// Checks custom resources, a JSON list on standard input, by the validators of npm's @kubernetes-models, which are made
// from the projects' own definitions. Answers with a JSON list: of each object, what is wrong with it.
//
// The validators let unknown fields pass, as the API server drops them in silence. Here they are errors: a field that no
// validator has looked at is one that the definition does not have.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const PACKAGES = {
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};
const models = join(process.argv[2], "node_modules", "@kubernetes-models");

function isInner(value) {
  return value !== null && typeof value === "object";
}

/** The value, and inside it every object, noting the paths that are read. */
function watched(value, path, read) {
  return new Proxy(value, {
    get(target, key) {
      const found = Reflect.get(target, key);
      if (typeof key === "symbol" || !Object.hasOwn(target, key)) return found;
      const place = `${path}/${key}`;
      read.add(place);
      return isInner(found) ? watched(found, place, read) : found;
    },
  });
}

function paths(value, path) {
  return isInner(value)
    ? Object.entries(value).flatMap(([key, inner]) => [`${path}/${key}`, ...paths(inner, `${path}/${key}`)])
    : [];
}

async function errorsOf(item) {
  const file = join(models, PACKAGES[item.apiVersion.split("/")[0]], item.apiVersion, `${item.kind}.js`);
  const model = new (await import(pathToFileURL(file)))[item.kind](item);
  const read = new Set();
  try {
    model.validate.call(watched(model, "", read));
  } catch (error) {
    return [error.message];
  }
  return paths(model, "").filter((path) => !read.has(path)).map((path) => `${path} is not known`);
}

const items = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify(await Promise.all(items.map(errorsOf))));
