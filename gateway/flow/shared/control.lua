-- One gateway's word to a pool's control loop: elects who decides, keeps what was decided, tells what others see.
--
-- KEYS: 1 the lock (hash: holder, term, until_us, heard_us, word, word_us), 2 what gateways see (hash: gateway id ->
--       {when, observation}), 3 the pool's meta, where its exchange finds the knobs of the queue (lua/1_state.lua).
-- ARGV: 1 now_us (0: the server's clock), 2 gateway id, 3 the term that it decides in (0: it does not), 4 how long the
--       lock holds, 5 how long an observation counts, 6 how long what was decided counts (all in microseconds), 7 its
--       observation, 8 what it decided ('': nothing), 9 the knobs of the queue as MessagePack, 10 'leaves' or ''.
-- Returns {now_us, holder, term, elected now, stored, what was decided, when, who decided before, when that one spoke
-- last, observations ...}; the observations are for the holder alone.

local DAY_MS = 86400000
local now_us, own, term = clock_us(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local lock = {}
do
  local flat = redis.call('HGETALL', KEYS[1])
  for i = 1, #flat, 2 do
    lock[flat[i]] = flat[i + 1]
  end
end
local holder, in_force = lock.holder or '', tonumber(lock.term or '0')
local is_holder = holder == own and term == in_force and term > 0

if ARGV[10] == 'leaves' then
  redis.call('HDEL', KEYS[2], own)
  if is_holder then
    redis.call('HSET', KEYS[1], 'until_us', '0')
  end
  return {}
end

redis.call('HSET', KEYS[2], own, cmsgpack.pack({now_us, ARGV[7]}))
redis.call('PEXPIRE', KEYS[2], DAY_MS)

local is_elected, before, heard_us = false, holder, tonumber(lock.heard_us or '0')
if not is_holder and (holder == own or tonumber(lock.until_us or '0') <= now_us) then
  -- A term only grows, also after Redis has forgotten the last one.
  in_force = math.max(in_force, term) + 1
  holder, is_holder, is_elected = own, true, true
end

local stored, seen = false, {}
if is_holder then
  redis.call('HSET', KEYS[1], 'holder', own, 'term', text(in_force), 'until_us', text(now_us + tonumber(ARGV[4])),
    'heard_us', text(now_us))
  redis.call('PEXPIRE', KEYS[1], 7 * DAY_MS)
  -- Who was elected just now has to know first what is in force.
  if ARGV[8] ~= '' and not is_elected then
    stored = true
    lock.word, lock.word_us = ARGV[8], text(now_us)
    redis.call('HSET', KEYS[1], 'word', lock.word, 'word_us', lock.word_us)
    local knobs = cmsgpack.unpack(ARGV[9])
    knobs.until_us = now_us + tonumber(ARGV[6])
    redis.call('HSET', KEYS[3], 'knobs', cmsgpack.pack(knobs))
  end
  local flat = redis.call('HGETALL', KEYS[2])
  for i = 1, #flat, 2 do
    local at_us, said = unpack(cmsgpack.unpack(flat[i + 1]))
    if now_us - at_us > tonumber(ARGV[5]) then
      redis.call('HDEL', KEYS[2], flat[i])
    else
      seen[#seen + 1] = said
    end
  end
end

local answer = {
  text(now_us), holder, text(in_force), is_elected and 1 or 0, stored and 1 or 0, lock.word or '', lock.word_us or '0',
  before, text(heard_us),
}
for _, said in ipairs(seen) do
  answer[#answer + 1] = said
end
return answer
