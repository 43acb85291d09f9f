-- Releases one name for each of several owners, as release.lua does for several names of one owner. The owners are distinct.
--
-- KEYS    1 .. n         the lock keys
--         n+1 .. 2n      their fence companions
--         2n+1 .. 3n     their metadata companions
-- ARGV    1  the prefix of the waiters' channels, before the lock key
--         2 .. n+1       the owner tokens
-- Answer  n if every owner held its name, and no message was received; else for each name 1 if its owner held it, 0 if not, and 2
--         more for each connection that its message has reached; or -1 if the release failed

local n, to = #KEYS / 3, ARGV[1]

-- The common case: every name is held and has no record yet.
local holders = redis.call('MGET', unpack(KEYS, 1, n))
local records = redis.call('MGET', unpack(KEYS, n + 1, n + n))
local simple = true
for i = 1, n do
  local holder = holders[i]
  simple = simple and holder and not records[i] and string.sub(holder, 1, 33) == ARGV[i + 1] .. '.'
end
local answers = {}
if simple then
  local received = 0
  for i = 1, n do
    local receivers = redis.call('PUBLISH', to .. KEYS[i], '')
    received = received + receivers
    answers[i] = 1 + 2 * receivers
  end
  redis.call('DEL', unpack(KEYS))
  return received == 0 and n or answers
end

for i = 1, n do
  local done, held, receivers = pcall(release_one, KEYS[i], KEYS[n + i], KEYS[n + n + i], ARGV[i + 1], to, '0')
  answers[i] = done and (held and 1 or 0) + 2 * receivers or -1
end
return answers
