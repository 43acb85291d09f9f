-- Extends leases to at least their ttl from now, each of them if its owner still holds all of its names.
--
-- KEYS    1 .. n         the lock keys of the leases, one lease after the other
--         n+1 .. 2n      their fence companions, in the same order. The call for a slot that moves in a cluster has only the
--                        lock keys: fence companions last much longer than the lease
--         2n+1 .. 3n     their metadata companions, only when one of the leases has metadata, and never without the fence
--                        companions: a missing key prevents the execution of a script while its slot moves
-- ARGV    1  how much longer than its lease a fence companion lasts, in ms, when it is written; an hour less at the least
--         then for each lease
--         -  the owner's token
--         -  the ttl in ms
--         -  how many names it has
-- Answer  a string with a digit for each lease: 1 extended, 0 lost (and nothing of it was changed)

local kept, HOUR = tonumber(ARGV[1]), 3600000
local n = 0
for a = 2, #ARGV, 3 do
  n = n + ARGV[a + 2]
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- MGET reads a key of another type as nil, where GET would fail together with the other leases. In parts, because Lua
-- unpacks no more than some thousands of values.
local holders = {}
for i = 1, n, 1000 do
  local part = redis.call('MGET', unpack(KEYS, i, math.min(i + 999, n)))
  for j = 1, #part do
    holders[i + j - 1] = part[j]
  end
end

local answers, first = {}, 1
for a = 2, #ARGV, 3 do
  local owner, ttl, last = ARGV[a], tonumber(ARGV[a + 1]), first + ARGV[a + 2] - 1
  local held = true
  for i = first, last do
    if holders[i] ~= owner then
      held = false
      break
    end
  end
  if held then
    for i = first, last do
      local left = redis.call('PTTL', KEYS[i])
      -- A lease that already lasts longer keeps its time, so that a late renewal shortens nothing. (-1: the key has no
      -- expiry any more.)
      if left >= 0 and left < ttl then
        redis.call('PEXPIRE', KEYS[i], ttl)
        if KEYS[n + n + i] then
          redis.call('PEXPIRE', KEYS[n + n + i], ttl)
        end
        -- The fence companion lasts long enough: it is extended only when the end of the lease moves past a full hour (with
        -- a second of overlap, because of rounding). That saves a write for replicas and the append-only file.
        if KEYS[n + i] and math.floor((now + left - 1000) / HOUR) < math.floor((now + ttl) / HOUR) then
          redis.call('PEXPIRE', KEYS[n + i], ttl + kept)
        end
      end
    end
  end
  answers[#answers + 1] = held and '1' or '0'
  first = last + 1
end
return table.concat(answers)
