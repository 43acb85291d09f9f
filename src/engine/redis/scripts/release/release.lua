-- Releases names, each of one owner: removes its position in the queue of the name, and hands the name off.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their queues
--         2n+1 .. 3n     their fence companions
--         3n+1 .. 4n     their metadata companions, only when one of the claims has metadata
-- ARGV    1  where waiters are notified, without the process: holdfast:to:, in a cluster with a hash tag of the slot. Where fence
--            companions outlast the release, or names stay busy: a space, and for how long the companions outlast it in ms
--            (0: they go with it). Where names stay busy: one more space and the time in ms
--         2 .. n+1       the owners' tokens; for an owner with a possible position in the queue `<token>:<process>` and
--                        the rest of the queue's member
-- Answer  n when every owner held its name; else for each name 1 if its owner held it, 0 if not, and 2 more when another call
--         has to hand it off; or -1 if its release failed. The failure of a single name is that of the script

local function release(i)
  local owner, process, ttl = string.match(ARGV[i + 1], '^(%x+):?(%x*)(.*)')
  local me = process == '' and '' or process .. ':' .. owner .. ttl
  local fence, metadata = KEYS[n + n + i], KEYS[n + n + n + i]
  local held, more = release_one(KEYS[i], KEYS[n + i], fence, metadata, owner, me, to, last, keep)
  return (held and 1 or 0) + (more and 2 or 0)
end

if n == 1 then
  return { release(1) }
end
local answers = {}
for i = 1, n do
  local done, answer = pcall(release, i)
  answers[i] = done and answer or -1
end
return answers
