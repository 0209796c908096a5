-- Puts a live hold under the limits given, which are at least those that it is on.
-- ARGV: now_us, epoch, spare, request id, 1 where it must fit, limits as text, its end user (or empty), the most end users,
--   then for each limit the columns of reserve.lua, with held, charged, most in place of first, ahead, most

if is_lost() then
  return {'lost'}
end
told = ARGV[3]
local request_id = ARGV[4]
local hold = find_hold(request_id)
if not hold then
  return {'gone'}
end
local gives_way, no_place = place_for(ARGV[7], tonumber(ARGV[8]))
if no_place then
  return no_place
end

local before = {}
for _, part in ipairs(hold.on) do
  before[part.name] = part
end
local on, found, names, over, refused = {}, {}, {}, {}, false
local to_fit, beside, wanted = {}, {}, {}
for i = 9, #ARGV, COLUMNS do
  local part, index = read_part(i), #on + 1
  local old, is_other = before[part.name], true
  local held, charged, most = tonumber(ARGV[i + 5]), tonumber(ARGV[i + 6]), tonumber(ARGV[i + 7])
  if old then
    is_other = old.amount ~= part.amount or old.rate ~= part.rate or old.mode ~= part.mode
    local again = held + charged
    part.start, held, charged, most = old.start, old.held, old.charged, old.most
    -- The counter as it is beside this request.
    found[index], names[index] = locate(part)
    if found[index] then
      part.held, part.charged, part.most = held, charged, most
      change(found[index], part, 0, 0, 0)
    end
    if part.exact then -- rules.part_in_force
      held = math.max(held, again - charged)
    end
  else
    local counter, _, ended = present(part, tonumber(ARGV[i + 9]), tonumber(ARGV[i + 10]))
    if not counter then
      return {'clock', now_us}
    end
    found[index], names[index], over[index] = counter, part.name, ended
  end
  if is_other then
    local place = #to_fit + 1
    to_fit[place], wanted[place] = index, {held, charged, most}
    beside[place] = found[index] and counter_text(found[index]) or ''
    if part.mode == HARD and is_short(found[index], part, held, most) then
      refused = true
    end
  end
  if found[index] then
    change(found[index], part, held, charged, most)
  else
    part.held, part.charged, part.most = held, charged, most
  end
  on[index] = part
end
if refused and ARGV[5] == '1' then
  local current = {}
  for i, part in ipairs(on) do
    current[i] = redis.call('HGET', hash_of(part.home), part.name) or ''
  end
  return {'denied', now_us, to_fit, beside, wanted, current}
end

if gives_way then
  forget_user(gives_way)
end
for i, part in ipairs(on) do
  if over[i] then
    keep_window(part.home, part.name, over[i])
  end
  if found[i] then
    store_located(part, names[i], found[i])
  end
end
local had_user = user_of(hold)
hold.on, hold.limits = on, ARGV[6]
if not had_user then
  hold_on_user(hold)
end
store_hold(request_id, hold)
return granted(hold, {})
